const SVG = "http://www.w3.org/2000/svg";
function svg(tag, options = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(options)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const hint = (words) => svg("title", {}, words);
const legend = (names) => make("div", {class: "legend"}, ...names.map((name, place) => make("span", {class: `s${place}`}, make("i"), name)));
const outcomesLegend = () => make("div", {class: "legend"},
  ...data.outcomes.map((name) => make("span", {class: cls(name)}, make("i"), name)));

// Share of programs over runs: one line a tier.
function trendChart(mode) {
  const wide = 900, tall = 260, left = 52, bottom = 34, tiers = TIERS.filter((tier) => data.runs.some((run) => run.by_mode[mode]?.[tier]));
  const points = tiers.map((tier) => data.runs.map((run, place) => {
    const counts = run.by_mode[mode]?.[tier];
    return counts?.rows[1] ? {place, run, counts, share: counts.rows[0] / counts.rows[1]} : null;
  }).filter(Boolean));
  const least = Math.min(1, ...points.flat().map((point) => point.share));
  const low = least > 0.98 ? 0.95 : least > 0.9 ? 0.8 : least > 0.6 ? 0.5 : 0;
  const x = (place) => left + 20 + (data.runs.length > 1 ? place * (wide - left - 50) / (data.runs.length - 1) : (wide - left) / 2);
  const y = (value) => 14 + (1 - (value - low) / (1 - low)) * (tall - bottom - 14);
  const chart = svg("svg", {class: "chart", viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": `tiers over runs, ${mode}`});
  for (let step = 0; step <= 4; step++) {
    const value = low + (1 - low) * step / 4;
    chart.append(svg("line", {class: "grid", x1: left, x2: wide, y1: y(value), y2: y(value)}),
      svg("text", {x: left - 6, y: y(value) + 4, "text-anchor": "end"}, `${(100 * value).toFixed(low > 0.9 ? 1 : 0)} %`));
  }
  const every = Math.ceil(data.runs.length / 12);
  data.runs.forEach((run, place) => {
    if (place % every === 0 || place === data.runs.length - 1)
      chart.append(svg("text", {x: x(place), y: tall - 12, "text-anchor": "middle"}, `run ${run.run}`));
  });
  points.forEach((line, series) => {
    chart.append(svg("path", {class: `s${series}`, d: line.map((point, place) => `${place ? "L" : "M"}${x(point.place)} ${y(point.share)}`).join("")}));
    for (const {place, run, counts, share: part} of line)
      chart.append(svg("circle", {class: `s${series}`, cx: x(place), cy: y(part), r: 4},
        hint(`run ${run.run}${run.commit ? `, ${run.commit.slice(0, 10)}` : ""}: ${share(...counts.rows)} ${data.tiers[tiers[series]]}, ${counts.rows[0]} of ${counts.rows[1]} rows`)));
  });
  return make("div", {}, legend(tiers.map((tier) => data.tiers[tier])), chart);
}

// How many programs erred by how much: a bar a quarter of a decade, with the limit of the gate.
function distribution(title, series, limit) {
  const wide = 640, tall = 190, left = 40, from = -9, to = 0.5, bins = (to - from) * 4;
  const counts = series.map(({values: given}) => {
    const found = new Array(bins).fill(0);
    for (const value of given) found[Math.max(0, Math.min(bins - 1, Math.floor((Math.log10(value || 1e-12) - from) * 4)))] += 1;
    return found;
  });
  const most = Math.max(1, ...counts.flat());
  const x = (decade) => left + (decade - from) / (to - from) * (wide - left - 8), y = (count) => 12 + (1 - count / most) * (tall - 42);
  const chart = svg("svg", {class: "chart", viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": title});
  for (let decade = from; decade <= 0; decade++)
    chart.append(svg("line", {class: "grid", x1: x(decade), x2: x(decade), y1: 12, y2: tall - 30}),
      svg("text", {x: x(decade), y: tall - 12, "text-anchor": "middle"}, `1e${decade}`));
  chart.append(svg("text", {x: left - 6, y: 20, "text-anchor": "end"}, `${most}`), svg("text", {x: left - 6, y: tall - 30, "text-anchor": "end"}, "0"));
  const step = (x(from + 0.25) - x(from)) / series.length;
  counts.forEach((found, place) => found.forEach((count, bin) => {
    if (count) chart.append(svg("rect", {class: `s${place}`, x: x(from + bin / 4) + place * step, width: Math.max(1, step - 0.6), y: y(count), height: tall - 30 - y(count)},
      hint(`${count} programs between ${(10 ** (from + bin / 4)).toExponential(1)} and ${(10 ** (from + bin / 4 + 0.25)).toExponential(1)}: ${series[place].name}`)));
  }));
  if (limit) chart.append(
    svg("path", {class: "mismatch", d: `M${x(Math.log10(limit))} 6V${tall - 30}`, "stroke-dasharray": "4 3"}),
    svg("text", {x: x(Math.log10(limit)) + 4, y: 16}, `limit ${limit.toExponential(0)}`));
  return make("div", {}, make("h3", {}, title), legend(series.map(({name, values: given}) => `${name} (${given.length})`)), chart);
}

// Ops against programs, drawn on a canvas of the size of what is in sight.
function matrix(ops, shown, told) {
  const {names, missing, used} = ops.shard, label = Math.min(300, Math.max(150, innerWidth * 0.28)), row = 15;
  const sets = new Map(shown.map((program) => [program, new Set(used[program.place])]));
  const canvas = make("canvas"), filler = make("div"), around = make("div", {id: "matrix", tabindex: "0", role: "img",
    "aria-label": `${ops.rows.length} ops against ${shown.length} programs`}, canvas, filler);
  let hovered = null;
  const geometry = () => {
    const room = around.clientWidth - label;
    const size = Math.max(5, Math.min(18, Math.floor(room / Math.max(1, shown.length))));
    return {size, tall: around.clientHeight || 500, wide: around.clientWidth || 900};
  };
  function fit() {
    const {size} = geometry(), height = Math.min(ops.rows.length * row + 4, Math.max(340, innerHeight - 272));
    around.style.height = `${height + 16}px`;
    filler.style.width = `${label + shown.length * size}px`;
    filler.style.height = `${Math.max(0, ops.rows.length * row - (around.clientHeight || height))}px`;
    draw();
  }
  function draw() {
    const {size, tall, wide} = geometry(), scale = devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    canvas.width = wide * scale; canvas.height = tall * scale;
    canvas.style.width = `${wide}px`; canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace"; pen.textBaseline = "middle";
    const firstRow = Math.floor(around.scrollTop / row), firstColumn = Math.floor(around.scrollLeft / size);
    const shift = around.scrollTop % row, left = around.scrollLeft % size;
    for (let line = firstRow; line < ops.rows.length && (line - firstRow) * row < tall + row; line++) {
      const op = ops.rows[line], y = (line - firstRow) * row - shift;
      if (hovered?.line === line) { pen.fillStyle = colour("--hover"); pen.fillRect(0, y, wide, row); }
      for (let column = firstColumn; column < shown.length && (column - firstColumn) * size < wide; column++) {
        const program = shown[column], x = label + (column - firstColumn) * size - left;
        if (!sets.get(program).has(op)) continue;
        const failed = program.cells.some((cell) => cell && cell.outcome !== PASS && cell.outcome < ATTEMPTED);
        pen.fillStyle = colour(missing[op] ? "--unsupported" : failed ? "--mismatch" : "--pass");
        pen.fillRect(x, y + 1, size - 1, row - 2);
      }
      pen.fillStyle = colour("--card"); pen.fillRect(0, y, label, row);
      pen.fillStyle = colour(missing[op] ? "--unsupported" : "--ink");
      const most = Math.floor((label - 12) / 6.7), name = names[op].replace("aten.", "").replace(".default", "");
      pen.fillText(name.length > most ? `${name.slice(0, most - 1)}…` : name, 8, y + row / 2);
    }
  }
  function place(event) {
    const box = canvas.getBoundingClientRect(), {size} = geometry();
    const line = Math.floor((event.clientY - box.top + around.scrollTop) / row);
    const column = event.clientX - box.left < label ? -1 : Math.floor((event.clientX - box.left - label + around.scrollLeft) / size);
    return {line, op: ops.rows[line], program: shown[column]};
  }
  canvas.addEventListener("mousemove", (event) => {
    hovered = place(event);
    const {op, program} = hovered;
    told.textContent = op === undefined ? "" : `${names[op]}${missing[op] ? ", which TorchTPU 0.2.0 has no kernel of" : ""}` +
      (program ? `: ${program.name} ${sets.get(program).has(op) ? "runs it" : "does not run it"}, ` +
        program.cells.map((cell, mode) => `${data.modes[mode]} ${cell?.status ?? "-"}`).join(", ") : "");
    draw();
  });
  canvas.addEventListener("click", (event) => {
    const {op, program} = place(event);
    if (op !== undefined && program) location.hash = address(`program/${program.name}`);
  });
  around.addEventListener("scroll", draw, {passive: true});
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(fit).observe(around);
  return around;
}
