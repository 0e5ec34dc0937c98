// What all pictures share: numbers, axes, marks, the tip, and the steps that are shown.
const SVG = "http://www.w3.org/2000/svg";
const PAD = { left: 56, right: 14, top: 18, bottom: 24 };
const charts = JSON.parse(document.getElementById("data").textContent);
const drawn = [];
// Every picture of a page has the same steps across, so that what happened together stands together.
const stepsOf = (line) => [...line.x, ...(line.ends ?? []), ...line.bad, ...(line.lost ?? [])];
const everyStep = charts.flatMap((chart) => (chart.rows ? [...chart.x, chart.end] : chart.lines.flatMap(stepsOf)));
const first = everyStep.reduce((low, step) => Math.min(low, step), Infinity);
const last = everyStep.reduce((high, step) => Math.max(high, step), -Infinity);
const whole = first > last ? [0, 1] : first === last ? [first - 1, first + 1] : [first, last];
let span = whole;
const zoom = (wanted) => { span = wanted; drawn.forEach((one) => one.draw()); };
const zoomTo = (low, high) => {
  const start = Math.max(whole[0], Math.floor(low));
  zoom([start, Math.min(whole[1], Math.max(Math.ceil(high), start + 1))]);
};

const make = (name, attributes, parent, text) => {
  const svg = ["svg", "path", "line", "text", "circle", "g", "clipPath", "rect", "title"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const short = (value, digits = 4) => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(digits - 2, 2)).replace(/\.?0+e/, "e");
  return String(size >= 1e4 && digits < 5 ? Math.round(value) : Number(value.toPrecision(digits)));
};
// The less values differ, the more digits it takes to tell them apart.
const digitsOf = (values) => {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const parts = Math.max(Math.abs(low), Math.abs(high)) / (high - low);
  return parts < 1e5 ? 4 + Math.min(Math.max(Math.floor(Math.log10(parts)), 0), 8) : 4;
};
// The middle of a name that is too long is left out; its title has all of it.
const clipped = (name, letters = 60) => (
  name.length > letters ? `${name.slice(0, letters / 3)}…${name.slice(1 - letters * 2 / 3)}` : name
);
const colour = (index) => `var(--c${index % 6})`;
// Beyond six lines colours come again, so the dashes tell them apart.
const dashes = (line, index) => (line.style === "dashed" ? "5 4" : ["", "7 3", "2 3"][Math.floor(index / 6) % 3]);

const ticks = (low, high, log, count) => {
  if (log) {
    const from = Math.ceil(low), to = Math.floor(high), every = Math.max(1, Math.ceil((to - from + 1) / count));
    const found = [];
    for (let power = from; power <= to; power += every) found.push(power);
    if (found.length > 2) return found;
    for (let power = from - 1; power <= to; power += 1) {
      for (const part of [2, 5]) found.push(power + Math.log10(part));
    }
    const inside = found.filter((value) => value >= low && value <= high).sort((a, b) => a - b);
    if (inside.length > 1) return inside;
    return niceNumbers(10 ** low, 10 ** high, count).filter((value) => value > 0).map(Math.log10);
  }
  return niceNumbers(low, high, count);
};

const niceNumbers = (low, high, count) => {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) {
    found.push(Number((at * step).toPrecision(12)));
  }
  return found;
};

// Issues are lines with the numbers of their cards above; those that stand close share one text.
const mark = (events, parent, at, down) => {
  const told = [];
  for (const [step, text, number] of events) {
    if (step < span[0] || step > span[1]) continue;
    const x = at(step), near = told.at(-1);
    if (!number) {
      const left = step > (span[0] + span[1]) / 2, place = { x: left ? x - 4 : x + 4, y: down - 5 };
      make("line", { class: "resumed", x1: x, x2: x, y1: PAD.top, y2: down }, parent);
      make("text", { ...place, "text-anchor": left ? "end" : "start" }, parent, text);
      continue;
    }
    make("line", { class: "event", x1: x, x2: x, y1: PAD.top, y2: down }, parent);
    if (near && x < near.x + 9 + 7 * near.numbers.join(" ").length) {
      if (!near.numbers.includes(number)) near.numbers.push(number);
    } else told.push({ x, numbers: [number] });
  }
  for (const { x, numbers } of told) {
    numbers.sort((a, b) => a - b);
    const text = numbers.length > 4 ? `${numbers.slice(0, 3).join(" ")} …` : numbers.join(" ");
    // The keys have the links of the contents and of the cards: they need not pass every mark of every chart.
    const link = parent.appendChild(document.createElementNS(SVG, "a"));
    link.setAttribute("href", `#issue${numbers[0]}`);
    link.setAttribute("tabindex", "-1");
    make("text", { class: "mark", x: x - 3, y: PAD.top - 5 }, link, text);
  }
};

const nameSteps = (parent, at, left, width, y) => {
  make("text", { x: left - 6, y, "text-anchor": "end" }, parent, "step");
  for (const step of ticks(span[0], span[1], false, width < 420 ? 4 : 6)) {
    if (!Number.isInteger(step) || step < first || step > last) continue;
    const anchor = at(step) > width - 40 ? "end" : at(step) < left + 12 ? "start" : "middle";
    make("text", { x: at(step), y, "text-anchor": anchor }, parent, short(step));
  }
};

const showTip = (one, x) => {
  one.tip.hidden = false;
  const picture = one.svg.getBoundingClientRect(), box = one.box.getBoundingClientRect();
  const place = picture.left - box.left + x, right = x > picture.width / 2;
  one.tip.style.left = right ? "auto" : `${place + 12}px`;
  one.tip.style.right = right ? `${box.width - place + 12}px` : "auto";
  one.tip.style.top = `${picture.top - box.top + 24}px`;
};

const enableZoom = (one) => {
  const node = one.svg, along = (event) => event.clientX - node.getBoundingClientRect().left;
  let start = null, chosen = null;
  const end = () => { start = null; chosen?.remove(); chosen = null; };
  node.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = along(event); });
  node.addEventListener("pointermove", (event) => {
    if (start === null) return;
    const [from, to] = [start, along(event)].sort((a, b) => a - b);
    chosen ??= make("rect", { class: "chosen", y: PAD.top, height: node.clientHeight - PAD.top - PAD.bottom }, node);
    chosen.setAttribute("x", from);
    chosen.setAttribute("width", to - from);
  });
  node.addEventListener("pointerup", (event) => {
    const from = start, to = along(event);
    end();
    if (from === null) return;
    const [low, high] = [one.step(from), one.step(to)].sort((a, b) => a - b);
    if (high - low > (span[1] - span[0]) / 50) zoomTo(low, high);
  });
  node.addEventListener("pointerleave", end);
  node.addEventListener("dblclick", () => zoom(whole));
};

// What a mouse can do can be done with keys: read a picture step by step, zoom in, and see all of it again.
const enableKeys = (one) => {
  one.svg.setAttribute("tabindex", "0");
  one.svg.addEventListener("keydown", (event) => {
    const steps = one.steps(), here = steps.indexOf(one.near), end = steps.length - 1;
    const places = { ArrowLeft: here < 0 ? end : here - 1, ArrowRight: here + 1, Home: 0, End: end };
    if (!steps.length || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in places) one.point(steps[Math.min(Math.max(places[event.key], 0), end)]);
    else if (one.turn && event.key === "ArrowUp") one.turn(-1);
    else if (one.turn && event.key === "ArrowDown") one.turn(1);
    else if (event.key === "+" || event.key === "-" || event.key === "Escape") {
      const near = one.near ?? steps[end], half = (span[1] - span[0]) / 4;
      event.key === "+" ? zoomTo(near - half, near + half) : zoom(whole);
      one.point(near);
    } else return;
    event.preventDefault();
  });
  one.svg.addEventListener("blur", () => one.leave());
};
