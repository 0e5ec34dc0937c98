"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PAD = { left: 56, right: 12, top: 10, bottom: 24 };
  const charts = JSON.parse(document.getElementById("data").textContent);

  const make = (name, attributes, parent, text) => {
    const svg = ["svg", "path", "line", "text", "circle", "g"].includes(name);
    const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
    return String(Number(value.toPrecision(4)));
  };
  const colour = (index) => `var(--c${index % 6})`;

  const ticks = (low, high, log, count) => {
    if (log) {
      const first = Math.ceil(low), last = Math.floor(high), every = Math.max(1, Math.ceil((last - first + 1) / count));
      const found = [];
      for (let power = first; power <= last; power += every) found.push(power);
      return found.length > 1 ? found : [low, high];
    }
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
    return found;
  };

  class Chart {
    constructor(data, parent) {
      this.data = data;
      this.log = data.log;
      this.hidden = new Set();
      this.box = make("div", { class: "chart" }, parent);
      const top = make("div", { class: "top" }, this.box);
      make("h3", {}, top, data.title);
      const button = make("button", { type: "button", title: "Switch the vertical axis" }, top);
      const label = () => { button.textContent = this.log ? "log" : "linear"; };
      button.addEventListener("click", () => { this.log = !this.log; label(); this.draw(); });
      label();
      this.svg = make("svg", { role: "img", "aria-label": data.title }, this.box);
      this.tip = make("div", { class: "tip", hidden: "" }, this.box);
      if (data.about) make("p", { class: "quiet" }, this.box, data.about);
      this.legend();
      this.svg.addEventListener("pointermove", (event) => this.hover(event));
      this.svg.addEventListener("pointerleave", () => this.leave());
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    legend() {
      const legend = make("div", { class: "legend" }, this.box);
      this.data.lines.forEach((line, index) => {
        const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
        make("i", { style: `background:${colour(index)}` }, button);
        button.append(line.name);
        button.addEventListener("click", () => {
          this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
          button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
          this.draw();
        });
      });
    }

    limits(lines) {
      let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
      for (const line of lines) {
        for (const x of line.x) { left = Math.min(left, x); right = Math.max(right, x); }
        for (const x of line.bad) { left = Math.min(left, x); right = Math.max(right, x); }
        for (const y of [...line.y, ...(line.low ?? []), ...(line.high ?? [])]) {
          if (this.log && y <= 0) continue;
          const value = this.log ? Math.log10(y) : y;
          low = Math.min(low, value); high = Math.max(high, value);
        }
      }
      if (left > right) [left, right] = [0, 1];
      if (low > high) [low, high] = [0, 1];
      const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [left, Math.max(right, left + 1), low - air, high + air];
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight;
      if (!width) return;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const shown = this.data.lines.filter((_, index) => !this.hidden.has(index));
      const [left, right, low, high] = this.limits(shown);
      const down = height - PAD.bottom, across = width - PAD.left - PAD.right;
      this.at = (step) => PAD.left + ((step - left) / (right - left)) * across;
      this.step = (x) => left + ((x - PAD.left) / across) * (right - left);
      // A zero has no place on a log axis: it lies on the lower edge.
      this.up = (y) => {
        const value = this.log ? (y > 0 ? Math.log10(y) : low) : y;
        return down - ((value - low) / (high - low)) * (down - PAD.top);
      };
      this.axes(left, right, low, high, width, down);
      for (const [step] of this.data.events) {
        make("line", { class: "event", x1: this.at(step), x2: this.at(step), y1: PAD.top, y2: down }, this.svg);
      }
      this.data.lines.forEach((line, index) => { if (!this.hidden.has(index)) this.curve(line, index); });
      this.cursor = make("g", {}, this.svg);
    }

    axes(left, right, low, high, width, down) {
      for (const value of ticks(low, high, this.log, 5)) {
        const y = down - ((value - low) / (high - low)) * (down - PAD.top);
        make("line", { class: "rule", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }, this.svg);
        const text = this.log ? short(10 ** value) : short(value);
        make("text", { x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, text);
      }
      for (const step of ticks(left, right, false, width < 420 ? 3 : 6)) {
        const anchor = this.at(step) > width - 40 ? "end" : "middle";
        make("text", { x: this.at(step), y: down + 16, "text-anchor": anchor }, this.svg, short(step));
      }
    }

    curve(line, index) {
      const point = (step, y, i) => `${i ? "L" : "M"}${this.at(step).toFixed(1)} ${this.up(y).toFixed(1)}`;
      const path = line.x.map((step, i) => point(step, line.y[i], i));
      if (line.low) {
        const back = line.x.map((step, i) => point(step, line.low[i], 1)).reverse();
        const band = line.x.map((step, i) => point(step, line.high[i], i)).concat(back, "Z").join("");
        const look = { fill: colour(index), "fill-opacity": 0.18, stroke: colour(index), "stroke-opacity": 0.35 };
        make("path", { d: band, "stroke-width": 0.7, ...look }, this.svg);
      }
      const style = { fill: "none", stroke: colour(index), "stroke-width": line.style === "wide" ? 4 : 1.6 };
      if (line.style === "wide") style["stroke-opacity"] = 0.55;
      if (line.style === "dashed") style["stroke-dasharray"] = "5 4";
      make("path", { d: path.join(""), ...style }, this.svg);
      if (line.x.length <= 24) {
        line.x.forEach((step, i) => {
          make("circle", { cx: this.at(step), cy: this.up(line.y[i]), r: 2.5, fill: colour(index) }, this.svg);
        });
      }
      for (const step of line.bad) {
        make("text", { x: this.at(step), y: PAD.top + 10, "text-anchor": "middle", style: "fill:var(--event)" }, this.svg, "∞");
      }
    }

    hover(event) {
      const bounds = this.svg.getBoundingClientRect();
      const wanted = this.step(event.clientX - bounds.left);
      const steps = this.data.lines.flatMap((line, index) => (this.hidden.has(index) ? [] : line.x));
      if (!steps.length) return;
      const near = steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best));
      this.cursor.replaceChildren();
      this.tip.replaceChildren();
      const x = this.at(near);
      make("line", { class: "cursor", x1: x, x2: x, y1: PAD.top, y2: bounds.height - PAD.bottom }, this.cursor);
      make("b", {}, this.tip, `step ${near}`);
      this.data.lines.forEach((line, index) => {
        if (this.hidden.has(index) || !line.x.length) return;
        const i = line.x.reduce((best, step, j) => (Math.abs(step - near) < Math.abs(line.x[best] - near) ? j : best), 0);
        make("circle", { cx: this.at(line.x[i]), cy: this.up(line.y[i]), r: 3, fill: colour(index) }, this.cursor);
        const range = line.low ? ` (${short(line.low[i])} to ${short(line.high[i])})` : "";
        const at = line.x[i] === near ? "" : ` (step ${line.x[i]})`;
        make("div", { style: `color:${colour(index)}` }, this.tip, `${line.name}: ${short(line.y[i])}${range}${at}`);
      });
      const reach = Math.abs(this.step(PAD.left + 8) - this.step(PAD.left));
      for (const [step, text] of this.data.events) {
        if (Math.abs(step - near) <= reach) make("div", {}, this.tip, `⚠ ${text} opened at step ${step}`);
      }
      this.tip.hidden = false;
      const place = this.svg.offsetLeft + x;
      const right = x > bounds.width / 2;
      this.tip.style.left = right ? "auto" : `${place + 12}px`;
      this.tip.style.right = right ? `${this.box.clientWidth - place + 12}px` : "auto";
      this.tip.style.top = `${this.svg.offsetTop + 8}px`;
    }

    leave() {
      this.tip.hidden = true;
      if (this.cursor) this.cursor.replaceChildren();
    }
  }

  const parent = document.getElementById("charts");
  const grids = new Map();
  for (const data of charts) {
    if (!grids.has(data.section)) {
      const section = make("section", {}, parent);
      make("h2", {}, section, data.section);
      grids.set(data.section, make("div", { class: "grid" }, section));
    }
    new Chart(data, grids.get(data.section));
  }

  for (const input of document.querySelectorAll("input[data-table]")) {
    const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }

  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => {
      const cell = button.parentElement, body = cell.closest("table").tBodies[0];
      const up = cell.getAttribute("aria-sort") === "descending";
      for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => row.cells[cell.cellIndex].textContent;
      const order = (a, b) => {
        const [x, y] = [Number(key(a)), Number(key(b))];
        return Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
      };
      const rows = [...body.rows].sort(order);
      body.append(...(up ? rows : rows.reverse()));
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
})();
