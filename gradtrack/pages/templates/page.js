const parent = document.getElementById("charts");
const grids = new Map();
// The section of a plugin is called like its metrics, in small letters; up to three of them are an abbreviation.
const headed = (section) => section.replace(/^[a-z_]+/, (word) => (
  word.length > 3 ? `${word[0].toUpperCase()}${word.slice(1).replaceAll("_", " ")}` : word.toUpperCase()
));
for (const data of charts) {
  if (!grids.has(data.section)) {
    const section = make("section", {}, parent);
    make("h2", {}, section, headed(data.section));
    grids.set(data.section, make("div", { class: "grid" }, section));
  }
  data.rows ? new HeatMap(data, grids.get(data.section)) : new Chart(data, grids.get(data.section));
}

drawn.forEach((one) => one.draw());

const contents = document.getElementById("contents");
document.querySelectorAll("main h2:not(.pair)").forEach((head, index) => {
  head.id = `part${index}`;
  make("a", { href: `#${head.id}` }, contents, head.textContent);
});

for (const input of document.querySelectorAll("input[data-table]")) {
  const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    rows.forEach((row, index) => {
      row.hidden = !words.every((word) => texts[index].includes(word));
      found += !row.hidden;
    });
    input.nextElementSibling.textContent = words.length ? `${found} of ${rows.length} rows` : "";
  });
}

for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const cell = button.parentElement, body = cell.closest("table").tBodies[0];
    const up = cell.getAttribute("aria-sort") === "descending";
    for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", up ? "ascending" : "descending");
    const number = (text) => Number(text.replace(/^step /, "").replace(/^(-?)inf$/, "$1Infinity"));
    const keyed = [...body.rows].map((row) => {
      const text = row.cells[cell.cellIndex].textContent;
      return { row, text, value: number(text) };
    });
    const sign = up ? 1 : -1, words = new Intl.Collator(undefined, { numeric: true });
    // What is no number stands last, whichever way the numbers go.
    keyed.sort((a, b) => {
      const [x, y] = [a.value, b.value];
      if (Number.isNaN(x) && Number.isNaN(y)) return sign * words.compare(a.text, b.text);
      return Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) : sign * (x > y) - sign * (x < y);
    });
    body.append(...keyed.map(({ row }) => row));
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// For printing everything is unfolded, and charts are drawn at the size of a sheet: scaled down they are unreadable.
const printing = (isOn) => {
  document.documentElement.classList.toggle("printing", isOn);
  drawn.forEach((one) => one.draw());
};
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  printing(true);
});
addEventListener("afterprint", () => printing(false));
