const SHOWN_LINES = 8;

class Chart {
  constructor(data, parent) {
    this.data = data;
    this.log = data.log;
    this.hidden = new Set([...data.lines.keys()].slice(SHOWN_LINES));
    this.digits = digitsOf(data.lines.flatMap((line) => line.y));
    this.box = make("div", { class: "chart" }, parent);
    const top = make("div", { class: "top" }, this.box);
    make("h3", { title: data.title }, top, clipped(data.title, 90));
    drawn.push(this);
    const button = make("button", { type: "button", title: "Switch the vertical axis" }, top);
    const label = () => {
      button.textContent = this.log ? "log" : "linear";
      button.setAttribute("aria-label", `Vertical axis of ${data.title}: ${button.textContent}`);
    };
    button.addEventListener("click", () => { this.log = !this.log; label(); this.draw(); });
    label();
    this.svg = make("svg", { role: "img", "aria-label": this.inWords() }, this.box);
    this.tip = make("div", { class: "tip", role: "status", hidden: "" }, this.box);
    if (data.about) make("p", { class: "quiet" }, this.box, data.about);
    this.legend();
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    enableZoom(this);
    enableKeys(this);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  inWords() {
    const told = this.data.lines.slice(0, 4).filter((line) => line.y.length).map((line) => {
      const low = line.y.reduce((a, b) => Math.min(a, b)), high = line.y.reduce((a, b) => Math.max(a, b));
      const ends = `${short(line.y[0])} at first, ${short(line.y.at(-1))} at last`;
      return `${clipped(line.name)} ${ends}, ${short(low)} to ${short(high)}`;
    });
    return `${this.data.title}: ${told.join("; ") || "no number"}.`;
  }

  legend() {
    // A single curve that is called like the chart needs no other name.
    const [only, ...others] = this.data.lines;
    if (!others.length && only.name.replaceAll("_", " ") === this.data.title.toLowerCase()) return;
    const legend = make("div", { class: "legend" }, this.box);
    const add = (line, index) => {
      const button = make("button", { type: "button", "aria-pressed": "true", title: line.name }, legend);
      this.key(line, index, button);
      button.append(clipped(line.name));
      button.addEventListener("click", () => {
        this.hidden.has(index) ? this.hidden.delete(index) : this.hidden.add(index);
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        this.draw();
      });
    };
    this.data.lines.slice(0, SHOWN_LINES).forEach(add);
    const rest = this.data.lines.slice(SHOWN_LINES);
    if (!rest.length) return;
    const more = make("button", { type: "button", class: "more" }, legend, `${rest.length} more`);
    more.addEventListener("click", () => {
      more.remove();
      rest.forEach((line, index) => { this.hidden.delete(index + SHOWN_LINES); add(line, index + SHOWN_LINES); });
      this.draw();
    });
  }

  key(line, index, parent) {
    const key = make("svg", { class: "key", viewBox: "0 0 20 8", "aria-hidden": "true" }, parent);
    const width = line.style === "wide" ? 5 : 2.5;
    const look = { stroke: colour(index), "stroke-width": width, "stroke-dasharray": dashes(line, index) };
    make("line", { x1: 0, x2: 20, y1: 4, y2: 4, ...look }, key);
  }

  limits(lines) {
    const [left, right] = span;
    let [low, high] = [Infinity, -Infinity];
    // What is zero throughout has no place on a log axis.
    this.isLog = this.log && lines.some((line) => line.y.some((y) => y > 0));
    for (const line of lines) {
      line.x.forEach((step, i) => {
        if (step < left || step > right) return;
        for (const y of [line.y[i], line.low?.[i] ?? line.y[i], line.high?.[i] ?? line.y[i]]) {
          if (this.isLog && y <= 0) continue;
          const value = this.isLog ? Math.log10(y) : y;
          low = Math.min(low, value); high = Math.max(high, value);
        }
      });
    }
    if (low > high) return [left, right, 0, 0];
    // What differs by rounding alone is a flat line.
    const isFlat = high - low < (this.isLog ? 1e-5 : Math.max(Math.abs(low), Math.abs(high)) * 1e-5);
    const air = isFlat ? (this.isLog ? 0.05 : Math.abs(high) * 0.1) : (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    // What cannot be negative does not begin below zero.
    return [left, right, this.isLog || low < 0 ? low - air : Math.max(low - air, -air * 0.1), high + air];
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width) return;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const shown = this.data.lines.filter((_, index) => !this.hidden.has(index));
    const [left, right, low, high] = this.limits(shown), isEmpty = low === high;
    const down = height - PAD.bottom, across = width - PAD.left - PAD.right;
    this.at = (step) => PAD.left + ((step - left) / (right - left)) * across;
    this.step = (x) => left + ((x - PAD.left) / across) * (right - left);
    // A zero has no place on a log axis: it lies on the lower edge.
    this.up = (y) => {
      const value = this.isLog ? (y > 0 ? Math.log10(y) : low) : y;
      return down - ((value - low) / (high - low)) * (down - PAD.top);
    };
    if (!isEmpty) this.axis(low, high, width, down);
    nameSteps(this.svg, this.at, PAD.left, width, down + 16);
    mark(this.data.events, this.svg, this.at, down);
    const clip = make("clipPath", { id: `clip${drawn.indexOf(this)}` }, this.svg);
    make("rect", { x: PAD.left - 4, y: 0, width: across + 8, height }, clip);
    this.plot = make("g", { "clip-path": `url(#clip${drawn.indexOf(this)})` }, this.svg);
    this.data.lines.forEach((line, index) => { if (!this.hidden.has(index)) this.curve(line, index); });
    if (shown.length && isEmpty) {
      const place = { x: (PAD.left + width) / 2, y: (PAD.top + down) / 2, "text-anchor": "middle" };
      make("text", place, this.svg, "No recorded value is finite.");
    }
    this.cursor = make("g", {}, this.svg);
  }

  axis(low, high, width, down) {
    const isZero = this.isLog && this.data.lines.some((line, index) => !this.hidden.has(index) && line.y.includes(0));
    if (isZero) make("text", { x: PAD.left - 6, y: down + 4, "text-anchor": "end" }, this.svg, "0");
    for (const value of ticks(low, high, this.isLog, 5)) {
      const y = down - ((value - low) / (high - low)) * (down - PAD.top);
      if (isZero && down - y < 13) continue;
      make("line", { class: "rule", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }, this.svg);
      const text = short(this.isLog ? 10 ** value : value, this.digits);
      make("text", { x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, text);
    }
  }

  curve(line, index) {
    const point = (step, y, i) => `${i ? "L" : "M"}${this.at(step).toFixed(1)} ${this.up(y).toFixed(1)}`;
    // A line does not pass over what is no number; a value that is left alone is a dot.
    const gaps = line.low ? [] : [...line.bad, ...(line.lost ?? [])];
    const path = line.x.map((step, i) => {
      const isApart = gaps.some((gap) => gap > line.x[i - 1] && gap < step);
      return point(step, line.y[i], isApart ? 0 : i) + (gaps.length ? "h0" : "");
    });
    if (line.low) {
      const back = line.x.map((step, i) => point(step, line.low[i], 1)).reverse();
      const band = line.x.map((step, i) => point(step, line.high[i], i)).concat(back, "Z").join("");
      // The bands of many lines would hide the lines.
      const few = this.data.lines.length < 5;
      const look = { fill: colour(index), "fill-opacity": few ? 0.18 : 0.05, stroke: colour(index) };
      make("path", { d: band, "stroke-width": 0.7, "stroke-opacity": few ? 0.35 : 0, ...look }, this.plot);
    }
    const style = { fill: "none", stroke: colour(index), "stroke-width": line.style === "wide" ? 4 : 1.6 };
    if (line.style === "wide") style["stroke-opacity"] = 0.55;
    style["stroke-dasharray"] = dashes(line, index);
    if (gaps.length) style["stroke-linecap"] = "round";
    make("path", { d: path.join(""), ...style }, this.plot);
    if (line.x.length <= 24) {
      line.x.forEach((step, i) => {
        make("circle", { cx: this.at(step), cy: this.up(line.y[i]), r: 2.5, fill: colour(index) }, this.plot);
      });
    }
    for (const [steps, sign, said] of [[line.bad, "∞", "infinite"], [line.lost ?? [], "×", "not a number"]]) {
      for (const step of steps) {
        const place = { class: "mark", x: this.at(step), y: PAD.top + 10, "text-anchor": "middle" };
        make("title", {}, make("text", place, this.plot, sign), `step ${step}: ${said}`);
      }
    }
  }

  steps() {
    const seen = this.data.lines.flatMap((line, index) => (this.hidden.has(index) ? [] : line.x));
    return [...new Set(seen)].filter((step) => step >= span[0] && step <= span[1]).sort((a, b) => a - b);
  }

  hover(event) {
    const wanted = this.step(event.clientX - this.svg.getBoundingClientRect().left), steps = this.steps();
    if (!steps.length) return;
    this.point(steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best)));
  }

  point(near) {
    this.near = near;
    this.cursor.replaceChildren();
    this.tip.replaceChildren();
    const x = this.at(near), down = this.svg.clientHeight - PAD.bottom;
    make("line", { class: "cursor", x1: x, x2: x, y1: PAD.top, y2: down }, this.cursor);
    make("b", {}, this.tip, `step ${near}`);
    this.data.lines.forEach((line, index) => {
      if (this.hidden.has(index) || !line.x.length) return;
      const i = line.x.reduce((best, step, j) => (Math.abs(step - near) < Math.abs(line.x[best] - near) ? j : best), 0);
      make("circle", { cx: this.at(line.x[i]), cy: this.up(line.y[i]), r: 3, fill: colour(index) }, this.cursor);
      const told = (value) => short(value, this.digits);
      const range = line.low ? ` (${told(line.low[i])} to ${told(line.high[i])})` : "";
      const at = line.x[i] === near ? "" : ` (step ${line.x[i]})`;
      const row = make("div", {}, this.tip);
      this.key(line, index, row);
      row.append(`${clipped(line.name)}: ${told(line.y[i])}${range}${at}`);
    });
    const reach = Math.abs(this.step(PAD.left + 8) - this.step(PAD.left));
    for (const [step, text, number] of this.data.events) {
      const told = number ? `⚠ ${text} opened at step ${step}` : `${text} after step ${step}`;
      if (Math.abs(step - near) <= reach) make("div", {}, this.tip, told);
    }
    showTip(this, x);
  }

  leave() {
    this.tip.hidden = true;
    this.near = undefined;
    if (this.cursor) this.cursor.replaceChildren();
  }
}
