"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const PASS = 0, ATTEMPTED = data.outcomes.length - 2;
const TIERS = Object.keys(data.tiers);
const at = Object.fromEntries([...data.numbers.map((name, place) => [name, place])]);
const LETTERS = {P: "pass", M: "mismatch", C: "crash", U: "unsupported", T: "timeout", N: "not run", B: "corpus bug"};
const text = (place) => (place < 0 ? null : data.strings[place]);
const programs = data.programs.map((row, place) => ({
  place, name: row[0], builder: text(row[1]), task: text(row[2]), group: text(row[3]), arch: text(row[4]),
  representative: row[5] === 1,
  models: row[6].map(([id, kind, source, predicted, ...limits]) => ({id, kind: text(kind), source: text(source),
    predicted: [...predicted].map(Number), limits: limits.map(text)})),
  cells: row[7].map((cell) => cell && {
    outcome: cell[0], status: data.outcomes[cell[0]], verdicts: cell[1], numbers: cell[2], error: text(cell[3]),
    ops: cell[4].map(text), fingerprint: text(cell[5])}),
  lines: row[8],
}));
const byName = new Map(programs.map((program) => [program.name, program]));
const changed = new Map();
for (const kind of ["worse", "better"])
  for (const entry of data.baseline?.[kind] ?? []) changed.set(`${entry.program} ${entry.mode}`, {kind, ...entry});
for (const program of programs)
  program.words = [program.name, program.group, program.arch, program.task, ...program.models.map((model) => model.id),
    ...program.cells.map((cell) => cell?.error ?? "")].join("\n").toLowerCase();

// Elements: everything that comes from a run is set as text, never as markup.
function make(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name === "hidden") made.hidden = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return made;
}
const cls = (status) => status.replace(" ", "-");
const link = (path, shown, query) => make("a", {href: address(path, query), title: shown}, shown);
const number = (value) => value.toLocaleString("en");
const small = (value) => (value === null || value === undefined ? "" : value === 0 ? "0" : value.toExponential(1));
const outcome = (cell) => (cell ? make("span", {class: `out ${cls(cell.status)}`}, cell.status) : make("span", {class: "soft"}, "-"));
function share(passed, of) {
  if (!of) return "-";
  let shown = (100 * passed / of).toFixed(1);
  if (shown === "100.0" && passed < of) shown = "99.9";
  if (shown === "0.0" && passed) shown = "0.1";
  return `${shown} %`;
}
function scaled(value, unit) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]])
    if (value >= size) return `${(value / size).toPrecision(3)} ${prefix}${unit}`;
  return `0 ${unit}`;
}
const gibibytes = (value) => `${(value / 2 ** 30).toLocaleString("en", {maximumSignificantDigits: 3})} GiB`;
function mebibytes(value) {
  return value === null || value === undefined ? "" : `${(value / 2 ** 20).toLocaleString("en", {maximumSignificantDigits: 3})} MiB`;
}

// The address holds the whole state of a view, so that it can be shared: #/programs?status=crash&mode=strict
function address(path, query = {}) {
  const kept = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  return `#/${path.split("/").map(encodeURIComponent).join("/")}${kept.size ? `?${kept}` : ""}`;
}
function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decodeURIComponent);
  return {view, name: rest.join("/"), query: Object.fromEntries(new URLSearchParams(query ?? ""))};
}
function keep(change) {
  const {view, name, query} = here();
  history.replaceState(null, "", address(name ? `${view}/${name}` : view, {...query, ...change}));
}

// Shards: scripts beside the page, for a page from a file may not fetch.
const loading = new Map(), arrived = new Map();
async function shard(name, packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  arrived.get(name)(JSON.parse(await new Response(stream).text()));
}
function load(name) {
  if (!loading.has(name))
    loading.set(name, new Promise((resolve, reject) => {
      arrived.set(name, resolve);
      document.head.append(make("script", {src: `data/${name}.js`,
        onerror: () => { loading.delete(name); reject(new Error(`data/${name}.js does not lie beside this page`)); }}));
    }));
  return loading.get(name);
}

// Counts of tiers over some programs, as the report counts them.
function reached(tier, cell, mode) {
  if (!cell || cell.outcome >= ATTEMPTED || (data.modes[mode] === "bounded" && tier !== "emulated")) return false;
  if (tier === "tier2") return cell.verdicts[TIERS.indexOf("tier1")] === 2;
  return tier !== "tier3" || cell.verdicts[TIERS.indexOf(tier)] !== 0;
}
function tiersOf(some, mode) {
  return Object.fromEntries(TIERS.map((tier) => {
    const bit = TIERS.indexOf(tier), count = {rows: [0, 0], programs: [0, 0], distinct: [0, 0]}, prints = new Map();
    for (const program of some) {
      const cell = program.cells[mode];
      if (!reached(tier, cell, mode)) continue;
      const passed = cell.verdicts[bit] === 2;
      for (const [kind, weight] of [["rows", program.models.length], ["programs", 1]]) {
        const fits = tier === "predicted_on_chip" && kind === "rows";
        count[kind][0] += fits ? program.models.filter((model) => model.predicted[mode] === 2).length : passed ? weight : 0;
        count[kind][1] += weight;
      }
      if (cell.fingerprint) prints.set(cell.fingerprint, passed && (prints.get(cell.fingerprint) ?? true));
    }
    count.distinct = [[...prints.values()].filter(Boolean).length, prints.size];
    return [tier, count];
  }));
}

// A table of any length: only the rows in sight are in the document.
const HEIGHT = 32;
function table(columns, rows, {sort, sorted} = {}) {
  const body = make("tbody");
  const head = make("tr", {}, ...columns.map((column) => {
    const mark = sort === column.name ? " ▾" : sort === `-${column.name}` ? " ▴" : "";
    const name = column.key && sorted
      ? make("button", {onclick: () => sorted(sort === column.name ? `-${column.name}` : column.name)}, column.title + mark)
      : column.title;
    return make("th", {class: column.kind, title: column.title, "aria-sort": mark ? (sort[0] === "-" ? "ascending" : "descending") : null}, name);
  }));
  const sizes = make("colgroup", {}, ...columns.map((column) => make("col", {style: `width: ${column.width}`})));
  const width = columns.reduce((sum, column) => sum + (column.least ?? parseFloat(column.width) ?? 0), 0);
  const made = make("table", {class: "virtual", "aria-rowcount": rows.length, style: `min-width: ${width}px`}, sizes, make("thead", {}, head), body);
  const around = make("div", {class: "scroll tall", tabindex: "0"}, made);
  let first = -1;
  const gap = (count) => make("tr", {class: "gap"}, make("td", {colspan: columns.length, style: `height: ${count * HEIGHT}px`}));
  function show() {
    const fit = Math.ceil((around.clientHeight || 700) / HEIGHT) + 20;
    const start = Math.max(0, Math.min(rows.length - fit, Math.floor(around.scrollTop / HEIGHT) - 10));
    const even = start - start % 5;
    if (even === first) return;
    first = even;
    const end = Math.min(rows.length, even + fit + 5);
    body.replaceChildren(gap(even), ...rows.slice(even, end).map((row, place) =>
      make("tr", {"aria-rowindex": even + place + 2}, ...columns.map((column) => {
        const shown = column.cell(row);
        const told = typeof shown === "string" ? shown : null;
        return make("td", {class: column.kind, title: told && told.length > 24 ? told : null}, shown);
      }))), gap(rows.length - end));
  }
  around.addEventListener("scroll", show, {passive: true});
  new ResizeObserver(() => { first = -1; show(); }).observe(around);
  show();
  return around;
}
function ordered(rows, columns, sort) {
  const column = columns.find((each) => each.name === sort?.replace("-", ""));
  if (!column?.key) return rows;
  const way = sort[0] === "-" ? 1 : -1;
  const keys = new Map(rows.map((row) => [row, column.key(row)]));
  const none = (key) => key === null || key === undefined || key === "";
  return [...rows].sort((a, b) => {
    const [left, right] = [keys.get(a), keys.get(b)];
    if (none(left) || none(right)) return none(left) - none(right);
    return (typeof left === "string" ? -left.localeCompare(right) : left - right) * way;
  });
}

// Filters, each with its place in the address.
const FILTERS = {
  text: (program, value) => program.words.includes(value.toLowerCase()),
  status: (program, value, modes) => modes.some((mode) => program.cells[mode]?.status === value),
  package: (program, value) => program.builder === value,
  task: (program, value) => program.task === value,
  architecture: (program, value) => program.group === value,
  fails: (program, value, modes) => modes.some((mode) =>
    reached(value, program.cells[mode], mode) && program.cells[mode].verdicts[TIERS.indexOf(value)] !== 2),
  op: (program, value, modes) => modes.some((mode) => program.cells[mode]?.ops.includes(value)),
  changed: (program, value, modes) => modes.some((mode) => changed.get(`${program.name} ${data.modes[mode]}`)?.kind === value),
};
function filtered(query) {
  const modes = query.mode ? [data.modes.indexOf(query.mode)] : data.modes.map((_, mode) => mode);
  return programs.filter((program) => Object.entries(FILTERS).every(([name, fits]) => !query[name] || fits(program, query[name], modes)));
}
const values = (name, some = programs) => [...new Set(some.map((program) => program[name]))].sort();
function choices() {
  const met = [...new Set(programs.flatMap((program) => program.cells.flatMap((cell) => cell?.ops ?? [])))].sort();
  const same = (list) => list.map((value) => [value, value]);
  return {
    status: ["every outcome", same(data.outcomes)],
    mode: ["every mode", same(data.modes)],
    package: ["every package", same(values("builder"))],
    task: ["every task", same(values("task"))],
    architecture: ["every architecture", same(values("group"))],
    fails: ["every tier", TIERS.map((tier) => [tier, `does not: ${data.tiers[tier]}`])],
    op: ["every op in the way", same(met)],
    changed: ["changed or not", data.baseline ? [["worse", "worse than before"], ["better", "better than before"]] : []],
  };
}
function filterBar(names, redraw) {
  const {query} = here();
  const search = make("input", {type: "search", placeholder: "program, model id, architecture or error", "aria-label": "search",
    value: query.text ?? "", class: query.text ? "on" : null,
    oninput: (event) => { keep({text: event.target.value}); redraw(); }});
  const selects = Object.entries(choices()).filter(([name, [, list]]) => names.includes(name) && list.length > (query[name] ? 0 : 1))
    .map(([name, [every, list]]) => make("select", {"aria-label": name, class: query[name] ? "on" : null,
      onchange: (event) => { event.target.classList.toggle("on", event.target.value !== ""); keep({[name]: event.target.value}); redraw(); }},
    make("option", {value: ""}, every),
    ...list.map(([value, shown]) => make("option", {value, selected: query[name] === value ? "" : null}, shown))));
  const clear = make("button", {onclick: () => {
    keep(Object.fromEntries(["text", "sort", ...names].map((name) => [name, ""])));
    show();
  }}, "clear");
  return make("div", {class: "filters"}, search, ...selects, clear);
}
