"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PAD = { left: 56, right: 14, top: 18, bottom: 24 };
  const charts = JSON.parse(document.getElementById("data").textContent);
  const drawn = [];
  // Every picture of a page has the same steps across, so that what happened together stands together.
  const everyStep = charts.flatMap((chart) => chart.x ?? chart.lines.flatMap((line) => [...line.x, ...line.bad]));
  const first = everyStep.reduce((low, step) => Math.min(low, step), Infinity);
  const last = everyStep.reduce((high, step) => Math.max(high, step), -Infinity);
  const whole = first > last ? [0, 1] : [first, Math.max(last, first + 1)];
  let span = whole;
  const zoom = (wanted) => { span = wanted; drawn.forEach((one) => one.draw()); };

  const make = (name, attributes, parent, text) => {
    const svg = ["svg", "path", "line", "text", "circle", "g", "clipPath", "rect"].includes(name);
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
  // The stops of the cividis colour map, which every eye reads from dark to light.
  const STOPS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
  const shade = (value, low, high) => {
    const place = Math.min(Math.max((value - low) / (high - low), 0), 1) * (STOPS.length - 1);
    const below = Math.min(Math.floor(place), STOPS.length - 2), share = place - below;
    const mix = STOPS[below].map((part, index) => Math.round(part + (STOPS[below + 1][index] - part) * share));
    return `rgb(${mix.join(",")})`;
  };
  const colour = (index) => `var(--c${index % 6})`;
  // Beyond six lines colours come again, so the dashes tell them apart.
  const dashes = (line, index) => (line.style === "dashed" ? "5 4" : ["", "7 3", "2 3"][Math.floor(index / 6) % 3]);

  const ticks = (low, high, log, count) => {
    if (log) {
      const from = Math.ceil(low), to = Math.floor(high), every = Math.max(1, Math.ceil((to - from + 1) / count));
      const found = [];
      for (let power = from; power <= to; power += every) found.push(power);
      if (found.length > 1) return found;
      for (let power = from - 1; power <= to; power += 1) {
        for (const part of [2, 5]) found.push(power + Math.log10(part));
      }
      const inside = found.filter((value) => value >= low && value <= high);
      if (inside.length > 1) return inside;
      return niceNumbers(10 ** low, 10 ** high, count).filter((value) => value > 0).map(Math.log10);
    }
    return niceNumbers(low, high, count);
  };

  const niceNumbers = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const found = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
    return found;
  };

  // Issues are lines with the number of their card above; a number that would cover another is left out.
  const mark = (events, parent, at, down) => {
    let free = -Infinity;
    for (const [step, , number] of events) {
      if (step < span[0] || step > span[1]) continue;
      const x = at(step);
      make("line", { class: "event", x1: x, x2: x, y1: PAD.top, y2: down }, parent);
      if (x < free) continue;
      make("text", { class: "mark", x, y: PAD.top - 5, "text-anchor": "middle" }, parent, number);
      free = x + 8 + 7 * String(number).length;
    }
  };

  const nameSteps = (parent, at, width, y) => {
    for (const step of ticks(span[0], span[1], false, width < 420 ? 3 : 6)) {
      const anchor = at(step) > width - 40 ? "end" : "middle";
      make("text", { x: at(step), y, "text-anchor": anchor }, parent, short(step));
    }
  };

  const showTip = (one, node, x) => {
    one.tip.hidden = false;
    const place = node.offsetLeft + x, right = x > node.clientWidth / 2;
    one.tip.style.left = right ? "auto" : `${place + 12}px`;
    one.tip.style.right = right ? `${one.box.clientWidth - place + 12}px` : "auto";
    one.tip.style.top = `${node.offsetTop + 8}px`;
  };

  const enableZoom = (node, step) => {
    const along = (event) => step(event.clientX - node.getBoundingClientRect().left);
    let start = null;
    node.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = along(event); });
    node.addEventListener("pointerup", (event) => {
      const [low, high] = [start, along(event)].sort((a, b) => a - b);
      if (start !== null && high - low > (span[1] - span[0]) / 50) {
        zoom([Math.max(whole[0], Math.floor(low)), Math.min(whole[1], Math.max(Math.ceil(high), Math.floor(low) + 1))]);
      }
      start = null;
    });
    node.addEventListener("dblclick", () => zoom(whole));
  };

  class HeatMap {
    constructor(data, parent) {
      this.data = data;
      this.box = make("div", { class: "chart wide" }, parent);
      make("h3", {}, this.box, data.title);
      this.svg = make("svg", { role: "img", "aria-label": data.title }, this.box);
      this.svg.style.height = `${Math.min(Math.max(data.rows.length * 15, 60), 480) + PAD.top + PAD.bottom}px`;
      this.tip = make("div", { class: "tip", hidden: "" }, this.box);
      const [low, high] = this.range();
      const scale = make("p", { class: "scale quiet" }, this.box);
      scale.append(short(10 ** low));
      make("i", {}, scale);
      scale.append(short(10 ** high), ` · ${data.about}`);
      drawn.push(this);
      this.svg.addEventListener("pointermove", (event) => this.hover(event));
      this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; });
      enableZoom(this.svg, (x) => this.step(x));
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    range() {
      const known = this.data.values.flat().filter((value) => value !== null && value > -99 && value < 99);
      const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
      return low > high ? [0, 1] : [low, high > low ? high : low + 1];
    }

    draw() {
      const width = this.svg.clientWidth, height = this.svg.clientHeight, { x, rows, values } = this.data;
      if (!width) return;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const left = Math.min(190, width * 0.3), right = width - PAD.right, down = height - PAD.bottom;
      const tall = (down - PAD.top) / rows.length, every = Math.ceil(11 / tall), [low, high] = this.range();
      this.at = (step) => left + ((step - span[0]) / (span[1] - span[0])) * (right - left);
      this.step = (place) => span[0] + ((place - left) / (right - left)) * (span[1] - span[0]);
      this.row = (place) => Math.floor((place - PAD.top) / tall);
      const ground = { x: left, y: PAD.top, width: right - left, height: down - PAD.top, fill: "var(--rule)" };
      make("rect", ground, this.svg);
      const letters = Math.floor((left - 10) / 6.3);
      rows.forEach((name, row) => {
        const y = PAD.top + row * tall;
        if (row % every === 0) {
          const shown = name.length > letters ? `${name.slice(0, letters / 3)}…${name.slice(1 - letters * 2 / 3)}` : name;
          make("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, this.svg, shown);
        }
        values[row].forEach((value, column) => {
          const from = Math.max(this.at(x[column]), left);
          const to = Math.min(column + 1 < x.length ? this.at(x[column + 1]) : right, right);
          if (value === null || to <= from) return;
          const fill = shade(value, low, high);
          make("rect", { x: from, y, width: to - from + 0.4, height: Math.max(tall - 0.6, 0.6), fill }, this.svg);
        });
      });
      mark(this.data.events, this.svg, this.at, down);
      nameSteps(this.svg, this.at, width, down + 16);
    }

    hover(event) {
      const bounds = this.svg.getBoundingClientRect(), { x, rows, values } = this.data;
      const place = event.clientX - bounds.left, row = this.row(event.clientY - bounds.top), step = this.step(place);
      if (step < span[0] || row < 0 || row >= rows.length) { this.tip.hidden = true; return; }
      const column = x.reduce((best, start, index) => (start <= step ? index : best), 0), value = values[row][column];
      this.tip.replaceChildren();
      make("b", {}, this.tip, rows[row]);
      const said = value === null ? "no finite gradient" : short(10 ** value);
      make("div", {}, this.tip, `step ${x[column]}: ${said}`);
      showTip(this, this.svg, place);
    }
  }

  class Chart {
    constructor(data, parent) {
      this.data = data;
      this.log = data.log;
      this.hidden = new Set();
      this.box = make("div", { class: "chart" }, parent);
      const top = make("div", { class: "top" }, this.box);
      make("h3", {}, top, data.title);
      drawn.push(this);
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
      enableZoom(this.svg, (x) => this.step(x));
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    legend() {
      const legend = make("div", { class: "legend" }, this.box);
      this.data.lines.forEach((line, index) => {
        const button = make("button", { type: "button", "aria-pressed": "true" }, legend);
        const key = make("svg", { class: "key", viewBox: "0 0 20 8" }, button);
        const width = line.style === "wide" ? 5 : 2.5;
        const look = { stroke: colour(index), "stroke-width": width, "stroke-dasharray": dashes(line, index) };
        make("line", { x1: 0, x2: 20, y1: 4, y2: 4, ...look }, key);
        button.append(line.name);
        button.addEventListener("click", () => {
          this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
          button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
          this.draw();
        });
      });
    }

    limits(lines) {
      const [left, right] = span;
      let [low, high] = [Infinity, -Infinity];
      for (const line of lines) {
        line.x.forEach((step, i) => {
          if (step < left || step > right) return;
          for (const y of [line.y[i], line.low?.[i] ?? line.y[i], line.high?.[i] ?? line.y[i]]) {
            if (this.log && y <= 0) continue;
            const value = this.log ? Math.log10(y) : y;
            low = Math.min(low, value); high = Math.max(high, value);
          }
        });
      }
      if (low > high) [low, high] = [0, 1];
      const air = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [left, right, low - air, high + air];
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
      mark(this.data.events, this.svg, this.at, down);
      const clip = make("clipPath", { id: `clip${drawn.indexOf(this)}` }, this.svg);
      make("rect", { x: PAD.left - 4, y: 0, width: across + 8, height }, clip);
      this.plot = make("g", { "clip-path": `url(#clip${drawn.indexOf(this)})` }, this.svg);
      this.data.lines.forEach((line, index) => { if (!this.hidden.has(index)) this.curve(line, index); });
      if (shown.length && !shown.some((line) => line.x.length || line.bad.length)) {
        const place = { x: (PAD.left + width) / 2, y: (PAD.top + down) / 2, "text-anchor": "middle" };
        make("text", place, this.svg, "No recorded value is a number.");
      }
      this.cursor = make("g", {}, this.svg);
    }

    axes(left, right, low, high, width, down) {
      for (const value of ticks(low, high, this.log, 5)) {
        const y = down - ((value - low) / (high - low)) * (down - PAD.top);
        make("line", { class: "rule", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }, this.svg);
        const text = this.log ? short(10 ** value) : short(value);
        make("text", { x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, text);
      }
      nameSteps(this.svg, this.at, width, down + 16);
    }

    curve(line, index) {
      const point = (step, y, i) => `${i ? "L" : "M"}${this.at(step).toFixed(1)} ${this.up(y).toFixed(1)}`;
      const path = line.x.map((step, i) => point(step, line.y[i], i));
      if (line.low) {
        const back = line.x.map((step, i) => point(step, line.low[i], 1)).reverse();
        const band = line.x.map((step, i) => point(step, line.high[i], i)).concat(back, "Z").join("");
        const look = { fill: colour(index), "fill-opacity": 0.18, stroke: colour(index), "stroke-opacity": 0.35 };
        make("path", { d: band, "stroke-width": 0.7, ...look }, this.plot);
      }
      const style = { fill: "none", stroke: colour(index), "stroke-width": line.style === "wide" ? 4 : 1.6 };
      if (line.style === "wide") style["stroke-opacity"] = 0.55;
      style["stroke-dasharray"] = dashes(line, index);
      make("path", { d: path.join(""), ...style }, this.plot);
      if (line.x.length <= 24) {
        line.x.forEach((step, i) => {
          make("circle", { cx: this.at(step), cy: this.up(line.y[i]), r: 2.5, fill: colour(index) }, this.plot);
        });
      }
      for (const step of line.bad) {
        const place = { x: this.at(step), y: PAD.top + 10, "text-anchor": "middle", style: "fill:var(--event)" };
        make("text", place, this.plot, "∞");
      }
    }

    hover(event) {
      const bounds = this.svg.getBoundingClientRect();
      const wanted = this.step(event.clientX - bounds.left);
      const seen = this.data.lines.flatMap((line, index) => (this.hidden.has(index) ? [] : line.x));
      const steps = seen.filter((step) => step >= span[0] && step <= span[1]);
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
      showTip(this, this.svg, x);
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
    data.rows ? new HeatMap(data, grids.get(data.section)) : new Chart(data, grids.get(data.section));
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
      const number = (text) => Number(text.replace(/^step /, ""));
      const sign = up ? 1 : -1;
      // What is no number stands last, whichever way the numbers go.
      const order = (a, b) => {
        const [x, y] = [number(key(a)), number(key(b))];
        if (Number.isNaN(x) && Number.isNaN(y)) return sign * key(a).localeCompare(key(b), undefined, { numeric: true });
        return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x - y);
      };
      body.append(...[...body.rows].sort(order));
    });
  }

  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    drawn.forEach((one) => one.draw());
  });
})();
