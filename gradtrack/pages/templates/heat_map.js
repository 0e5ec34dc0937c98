// The stops of the cividis colour map, which every eye reads from dark to light.
const STOPS = [[0, 34, 78], [53, 69, 108], [102, 105, 112], [148, 142, 119], [200, 184, 102], [254, 232, 56]];
const shade = (value, low, high) => {
  const place = Math.min(Math.max((value - low) / (high - low), 0), 1) * (STOPS.length - 1);
  const below = Math.min(Math.floor(place), STOPS.length - 2), share = place - below;
  const mix = STOPS[below].map((part, index) => Math.round(part + (STOPS[below + 1][index] - part) * share));
  return `rgb(${mix.join(",")})`;
};

class HeatMap {
  constructor(data, parent) {
    this.data = data;
    this.shownRow = 0;
    this.box = make("div", { class: "chart wide" }, parent);
    make("h3", {}, this.box, data.title);
    const [low, high] = this.range();
    const label = `${data.title}: ${data.rows.length} rows from ${short(10 ** low)} to ${short(10 ** high)}.`;
    this.svg = make("svg", { role: "img", "aria-label": label }, this.box);
    this.svg.style.height = `${Math.min(Math.max(data.rows.length * 15, 60), 480) + PAD.top + PAD.bottom}px`;
    this.tip = make("div", { class: "tip", role: "status", hidden: "" }, this.box);
    const scale = make("p", { class: "scale quiet" }, this.box);
    scale.append(short(10 ** low));
    make("i", {}, scale);
    scale.append(short(10 ** high), ` · ${data.about}`);
    drawn.push(this);
    this.svg.addEventListener("pointermove", (event) => this.hover(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    enableZoom(this);
    enableKeys(this);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  range() {
    if (this.data.scale) return [this.data.scale[0], Math.max(this.data.scale[1], this.data.scale[0] + 0.01)];
    const known = this.data.values.flat().filter((value) => value !== null && value > -99 && value < 99);
    const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
    return low > high ? [0, 1] : [low, high > low ? high : low + 1];
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight, { x, end, rows, values } = this.data;
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
        make("text", { x: left - 6, y: y + tall / 2 + 4, "text-anchor": "end" }, this.svg, clipped(name, letters));
      }
      values[row].forEach((value, column) => {
        const from = Math.max(this.at(x[column]), left);
        const to = Math.min(this.at(x[column + 1] ?? end + 1), right);
        if (value === null || to <= from) return;
        const fill = shade(value, low, high);
        make("rect", { x: from, y, width: to - from + 0.4, height: Math.max(tall - 0.6, 0.6), fill }, this.svg);
      });
    });
    mark(this.data.events, this.svg, this.at, down);
    nameSteps(this.svg, this.at, left, width, down + 16);
  }

  steps() { return this.data.x.filter((step) => step >= span[0] && step <= span[1]); }

  turn(rows) {
    this.shownRow = Math.min(Math.max(this.shownRow + rows, 0), this.data.rows.length - 1);
    this.point(this.near ?? this.steps()[0]);
  }

  hover(event) {
    const bounds = this.svg.getBoundingClientRect(), row = this.row(event.clientY - bounds.top);
    const step = this.step(event.clientX - bounds.left);
    if (step < span[0] || row < 0 || row >= this.data.rows.length) { this.leave(); return; }
    this.shownRow = row;
    this.point(step);
  }

  point(step) {
    const { x, rows, values } = this.data, row = this.shownRow;
    const column = x.reduce((best, start, index) => (start <= step ? index : best), 0), value = values[row][column];
    this.near = x[column];
    this.tip.replaceChildren();
    make("b", {}, this.tip, clipped(rows[row]));
    const said = value === null ? "no finite gradient" : short(10 ** value);
    make("div", {}, this.tip, `step ${x[column]}: ${said}`);
    showTip(this, this.at(step));
  }

  leave() {
    this.tip.hidden = true;
    this.near = undefined;
  }
}
