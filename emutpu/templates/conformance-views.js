const view = document.getElementById("view"), overview = document.getElementById("overview");
const modesOf = (query) => (query.mode ? [data.modes.indexOf(query.mode)] : data.modes.map((_, mode) => mode));
const worst = (program, name) => program.cells.reduce((most, cell) => {
  const value = cell?.numbers[at[name]] ?? null;
  return value === null ? most : Math.max(most ?? 0, value);
}, null);
const firstError = (program, modes) => modes.map((mode) => program.cells[mode]?.error).find(Boolean) ?? "";
function timeline(letters, most = 16) {
  const cut = letters.slice(-most), runs = data.runs.slice(-most);
  return make("span", {class: "line"}, ...[...cut].map((letter, place) => make("i", {class: LETTERS[letter] ? cls(LETTERS[letter]) : "none",
    title: `run ${runs[place]?.run}: ${LETTERS[letter] ?? "without it"}`})));
}

function programColumns(query, byModel) {
  const modes = modesOf(query), columns = [];
  if (byModel) columns.push({name: "id", title: "model", width: "24%", least: 220, key: (row) => row.id,
    cell: (row) => link(`model/${row.id}`, row.id)});
  columns.push({name: "program", title: "program", width: byModel ? "20%" : "30%", least: 230, key: (row) => row.program.name,
    cell: (row) => link(`program/${row.program.name}`, row.program.name)});
  for (const mode of modes) columns.push({name: data.modes[mode], title: data.modes[mode], width: "116px",
    key: (row) => row.program.cells[mode]?.outcome ?? -1, cell: (row) => outcome(row.program.cells[mode])});
  columns.push({name: "predicted", title: "predicted", width: "112px", key: (row) => predicted(row, modes),
    cell: (row) => ({2: make("span", {class: "good"}, "yes"), 1: make("span", {class: "bad"}, "no"), 0: "-"})[predicted(row, modes)]});
  columns.push({name: "task", title: "task", width: "15%", least: 130, key: (row) => row.program.task, cell: (row) => row.program.task});
  if (!byModel) columns.push({name: "models", title: "models", kind: "n", width: "88px", key: (row) => row.program.models.length,
    cell: (row) => number(row.program.models.length)});
  columns.push({name: "error", title: "rel. error", kind: "n", width: "106px", key: (row) => worst(row.program, "max_rel_error"),
    cell: (row) => small(worst(row.program, "max_rel_error"))});
  columns.push({name: "seconds", title: "seconds", kind: "n", width: "94px", key: (row) => worst(row.program, "seconds"),
    cell: (row) => worst(row.program, "seconds")?.toFixed(1) ?? ""});
  if (data.runs.length > 1) columns.push({name: "runs", title: "runs", width: `${Math.max(58, Math.min(16, data.runs.length) * 7 + 24)}px`, cell: (row) => timeline(row.program.lines[modes[0]])});
  columns.push({name: "says", title: "says", width: "20%", least: 160, cell: (row) => make("span", {class: "soft", title: firstError(row.program, modes)}, firstError(row.program, modes))});
  return columns;
}
function predicted({program, model}, modes) {
  const bits = modes.map((mode) => (model ? model.predicted : program.cells.map((cell) => cell?.verdicts[TIERS.indexOf("predicted_on_chip")] ?? 0))[mode]).filter(Boolean);
  return bits.length ? Math.min(...bits) : 0;
}

// The filters and the table of programs or models, anywhere; `fixed` are filters that the view itself sets.
function programTable(fixed = {}) {
  const names = [...Object.keys(choices())].filter((name) => !(name in fixed));
  const count = make("div", {class: "soft"}), place = make("div");
  const by = make("select", {"aria-label": "rows", onchange: (event) => { keep({by: event.target.value, sort: ""}); redraw(); }},
    make("option", {value: ""}, "a row a program"), make("option", {value: "models", selected: here().query.by === "models" ? "" : null}, "a row a model"));
  function redraw() {
    const query = {...here().query, ...fixed}, byModel = query.by === "models", found = filtered(query);
    const words = (query.text ?? "").toLowerCase();
    const hits = (program) => program.models.filter((model) => model.id.toLowerCase().includes(words));
    const rows = byModel
      ? found.flatMap((program) => (words && hits(program).length ? hits(program) : program.models).map((model) => ({id: model.id, model, program})))
      : found.map((program) => ({program}));
    const columns = programColumns(query, byModel), models = found.reduce((sum, program) => sum + program.models.length, 0);
    count.textContent = byModel
      ? `${number(rows.length)} of ${number(programs.reduce((sum, program) => sum + program.models.length, 0))} models`
      : `${number(found.length)} of ${number(programs.length)} programs, ${number(models)} models`;
    place.replaceChildren(table(columns, ordered(rows, columns, query.sort), {sort: query.sort, sorted: (sort) => { keep({sort}); redraw(); }}));
  }
  const bar = filterBar(names, redraw);
  bar.insertBefore(by, bar.lastChild);
  redraw();
  return make("div", {}, bar, make("div", {class: "count"}, count), place);
}

function tierTable(some) {
  const rows = TIERS.map((tier) => [tier, data.modes.map((_, mode) => tiersOf(some, mode)[tier])]).filter(([, cells]) => cells.some((cell) => cell.rows[1]));
  return make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th"), ...data.modes.map((mode) => make("th", {class: "n"}, mode)))),
    make("tbody", {}, ...rows.map(([tier, cells]) => make("tr", {}, make("th", {scope: "row"}, data.tiers[tier]),
      ...cells.map((cell) => make("td", {class: "n"}, make("b", {}, share(...cell.rows)), make("br"), cell.rows[1] === 0 ? null :
        make("span", {class: "soft"}, `${number(cell.rows[0])} of ${number(cell.rows[1])} rows, ${number(cell.programs[0])} of ${number(cell.programs[1])} programs`))))))));
}
function bar(some, mode) {
  const counts = data.outcomes.map((_, place) => some.filter((program) => program.cells[mode]?.outcome === place).length);
  const told = counts.map((count, place) => (count ? `${count} ${data.outcomes[place]}` : "")).filter(Boolean).join(", ");
  return make("div", {class: "bar", title: `${data.modes[mode]}: ${told || "not run"}`},
    ...counts.map((count, place) => count && make("i", {class: cls(data.outcomes[place]), style: `flex: ${count} 1 0`})).filter(Boolean));
}
function groupTable(field, path) {
  const groups = Map.groupBy ? Map.groupBy(programs, (program) => program[field]) : programs.reduce((found, program) =>
    found.set(program[field], [...(found.get(program[field]) ?? []), program]), new Map());
  const rows = [...groups].map(([name, some]) => ({name, some, models: some.reduce((sum, program) => sum + program.models.length, 0),
    tiers: data.modes.map((_, mode) => tiersOf(some, mode))}));
  const columns = [
    {name: "name", title: path, width: "30%", least: 180, key: (row) => row.name, cell: (row) => link(`${path}/${row.name}`, row.name)},
    {name: "programs", title: "programs", kind: "n", width: "106px", key: (row) => row.some.length, cell: (row) => number(row.some.length)},
    {name: "models", title: "models", kind: "n", width: "84px", key: (row) => row.models, cell: (row) => number(row.models)}];
  data.modes.forEach((mode, place) => columns.push(
    {name: mode, title: `${mode}: programs`, width: "16%", least: 120, key: (row) => ratio(row.tiers[place].emulated.programs), cell: (row) => bar(row.some, place)},
    {name: `${mode}-predicted`, title: "predicted", kind: "n", width: "108px", key: (row) => ratio(row.tiers[place].predicted_on_chip.rows),
      cell: (row) => share(...row.tiers[place].predicted_on_chip.rows)}));
  const place = make("div");
  function redraw() {
    const {query} = here(), found = rows.filter((row) => row.name.toLowerCase().includes((query.text ?? "").toLowerCase()));
    const sort = query.sort ?? "programs";
    place.replaceChildren(make("div", {class: "count soft"}, `${number(found.length)} of ${number(rows.length)}`),
      table(columns, ordered(found, columns, sort), {sort, sorted: (given) => { keep({sort: given}); redraw(); }}));
  }
  const search = make("input", {type: "search", placeholder: path, "aria-label": "search", value: here().query.text ?? "",
    oninput: (event) => { keep({text: event.target.value}); redraw(); }});
  redraw();
  return make("div", {}, make("div", {class: "filters"}, search), outcomesLegend(), place);
}
const ratio = ([passed, of]) => (of ? passed / of : null);
const group = (field, path, filter) => ({
  list: () => groupTable(field, path),
  page: (name) => {
    const some = programs.filter((program) => program[field] === name);
    if (!some.length) return make("p", {}, `No ${path} is called ${name}.`);
    return make("div", {}, make("h2", {}, name), tierTable(some), make("h2", {}, "Programs"), programTable({[filter]: name}));
  },
});
const packages = group("builder", "package", "package"), tasks = group("task", "task", "task"), families = group("group", "architecture", "architecture");

function facts(rows) {
  const known = rows.filter(([, cells]) => cells.some((cell) => cell !== null && cell !== undefined && cell !== ""));
  return make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th"), ...data.modes.map((mode) => make("th", {}, mode)))),
    make("tbody", {}, ...known.map(([name, cells]) => make("tr", {}, make("th", {scope: "row"}, name), ...cells.map((cell) => make("td", {}, cell ?? "")))))));
}
async function programPage(name, model) {
  const program = byName.get(name);
  if (!program) return make("p", {}, `No program is called ${name}.`);
  const shardNumber = Math.floor(program.place / data.shard);
  const [details, ops] = await Promise.all([load(`${shardNumber}`), load("ops")]);
  const detail = details[program.place % data.shard], told = data.modes.map((mode) => detail[mode] ?? null);
  const cells = (pick) => program.cells.map((cell, mode) => (cell && told[mode] ? pick(cell, told[mode]) : null));
  const tri = (value) => ({true: "yes", false: "no"})[value] ?? null;
  const verdict = (tier) => cells((cell) => ({2: make("span", {class: "good"}, "yes"), 1: make("span", {class: "bad"}, "no")})[cell.verdicts[TIERS.indexOf(tier)]] ?? null);
  const limited = (field, limit) => cells((cell) => {
    const value = cell.numbers[at[field]];
    if (value === null) return null;
    const bound = data.limits[limit ?? field];
    const wide = told.some((more) => more?.ill_conditioned?.length);
    return make("span", {class: bound && value > bound && !wide ? "bad" : null}, `${small(value)}${bound ? ` (limit ${bound.toExponential(0)})` : ""}`);
  });
  const table_ = facts([
    ["outcome", program.cells.map(outcome)],
    ["ended in", cells((_, more) => more.stage)],
    ["ran as", cells((_, more) => more.same_as && link(`program/${more.same_as}`, more.same_as))],
    ...TIERS.map((tier) => [data.tiers[tier], verdict(tier)]),
    ["in the way on the chip", cells((_, more) => more.prediction_limits?.join("; "))],
    ["memory at full size", cells((_, more) => more.full_size_bytes && `${gibibytes(more.full_size_bytes)} of the ${more.full_size}${data.prediction?.device_bytes ? `; a device has ${gibibytes(data.prediction.device_bytes)}` : ""}`)],
    ["kernels that TorchTPU lacks", cells((_, more) => more.missing_kernels?.join(", "))],
    ["ops whose size depends on values", cells((_, more) => more.data_dependent?.join(", "))],
    ["ops in the way", cells((cell) => cell.ops.join(", "))],
    ["relative error of the answer", limited("max_rel_error")],
    ["relative error of the gradients", limited("gradient_error")],
    ["the CPU's own distance from float64", cells((cell) => [cell.numbers[at.logit_noise], cell.numbers[at.gradient_noise]].filter((value) => value !== null).map(small).join(", gradients "))],
    ["relative error at default precision", limited("default_error")],
    ["what default precision says", cells((_, more) => more.tier3_error)],
    ["perplexity", cells((_, more) => more.cpu_perplexity && `${more.cpu_perplexity.toFixed(3)} on the CPU, ${more.perplexity?.toFixed(3) ?? "-"} here` + (more.default_perplexity ? `, ${more.default_perplexity.toFixed(3)} at default precision` : ""))],
    ["same tokens", cells((_, more) => tri(more.tokens_equal))],
    ["trained a step", cells((_, more) => tri(more.trained))],
    ["judged against float64", cells((_, more) => more.ill_conditioned?.join(", "))],
    ["ops", cells((_, more) => more.ops && number(more.ops.reduce((sum, [, count]) => sum + count, 0)))],
    ["regions", cells((_, more) => more.regions && `${number(more.regions)}: ${Object.entries(more.region_reasons ?? {}).map(([reason, count]) => `${count} ${reason}`).join(", ")}`)],
    ["compiled", cells((_, more) => more.compiles !== null && more.compiles !== undefined ? `${number(more.compiles)}${more.compile_seconds ? `, ${more.compile_seconds.toFixed(1)} s` : ""}` : null)],
    ["executables over the lengths", cells((_, more) => more.executables)],
    ["fallbacks", cells((_, more) => more.fallback_ops?.length ? more.fallback_ops.join(", ") : more.fallbacks)],
    [`peak HBM on ${data.chip}`, cells((_, more) => mebibytes(more.peak_hbm_bytes))],
    ["seconds on this machine", cells((cell) => cell.numbers[at.seconds]?.toFixed(1))],
    ["fingerprint", cells((_, more) => more.fingerprint && make("code", {}, more.fingerprint))],
  ]);
  const parts = [make("p", {class: "crumbs"}, link("programs", "programs"), " / ", link(`package/${program.builder}`, program.builder), " / ", link(`task/${program.task}`, program.task),
    " / ", link(`architecture/${program.group}`, program.group)), make("h2", {}, program.name), table_, ...errors(told, program)];
  parts.push(modelled(told), history_(program), opsOf(told, ops));
  parts.push(make("h3", {}, `Models that are this program (${number(program.models.length)})`), make("ul", {class: "ids"},
    ...program.models.map(({id, kind, source, limits}) => make("li", {class: id === model ? "here" : null}, id, make("span", {class: "soft"}, ` ${kind}, ${source}`),
      limits.length ? make("span", {class: "warn"}, ` ${limits.join("; ")}`) : null))));
  return make("div", {}, ...parts);
}
function errors(told, program) {
  const said = new Map();
  told.forEach((more, mode) => {
    if (!more?.error) return;
    const key = `${more.error}\n${(more.traceback ?? []).join("\n")}`;
    said.set(key, [...(said.get(key) ?? []), mode]);
  });
  return [...said.values()].flatMap((modes) => {
    const more = told[modes[0]];
    return [make("h3", {}, `Error in ${modes.map((mode) => data.modes[mode]).join(" and ")}`),
      make("pre", {class: cls(program.cells[modes[0]].status)}, more.error),
      more.traceback?.length ? make("div", {}, make("div", {class: "soft"}, "the model's lines, the innermost last"), make("pre", {}, more.traceback.join("\n"))) : null];
  });
}
function modelled(told) {
  const chips = [...new Set(told.flatMap((more) => Object.keys(more?.modelled ?? {})))];
  if (!chips.length) return null;
  const modes = data.modes.map((_, mode) => mode).filter((mode) => told[mode]?.modelled);
  const whole = told.find((more) => more?.full_size_bytes)?.full_size_bytes;
  const fit = (chip) => (data.device_bytes[chip] && whole ? make("span", {class: whole > data.device_bytes[chip] ? "bad" : null}, `${gibibytes(whole)} of ${gibibytes(data.device_bytes[chip])}`)
    : data.device_bytes[chip] ? `? of ${gibibytes(data.device_bytes[chip])}` : "");
  const cell = (cost) => (cost?.bound ? [make("td", {class: "n", title: `${cost.launches} launches, ${cost.unmodelled} without a cost`}, scaled(cost.seconds, "s"), make("span", {class: "soft"}, ` ±${Math.round(100 * cost.error_bar)} %`)),
    make("td", {class: "n"}, scaled(cost.hbm_bytes, "B")), make("td", {}, cost.bound)] : [make("td", {class: "n"}, "-"), make("td"), make("td")]);
  return make("div", {}, make("h3", {}, "Modelled device time by chip"), make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th"), make("th"), ...modes.map((mode) => make("th", {class: "mode", colspan: 3}, data.modes[mode]))),
      make("tr", {}, make("th", {}, "chip"), make("th", {class: "n"}, "full size in HBM"), ...modes.flatMap(() => [make("th", {class: "n"}, "busy"), make("th", {class: "n"}, "HBM traffic"), make("th", {}, "bound by")]))),
    make("tbody", {}, ...chips.map((chip) => make("tr", {}, make("th", {scope: "row"}, chip), make("td", {class: "n"}, fit(chip)), ...modes.flatMap((mode) => cell(told[mode].modelled[chip]))))))),
    make("p", {class: "soft"}, "Time and traffic are those of the small program with its training step and checks; full size is the library's configuration, forward at batch 1. All by the model: nothing is measured on a chip."));
}
function history_(program) {
  if (data.runs.length < 2) return null;
  return make("div", {}, make("h3", {}, "Runs, the latest first"), make("div", {class: "scroll"}, make("table", {class: "narrow"}, make("tbody", {},
    ...data.runs.map((run, place) => [run, place]).reverse().slice(0, 12).map(([run, place]) => make("tr", {}, make("td", {class: "n"}, `run ${run.run}`),
      make("td", {}, make("code", {}, run.commit?.slice(0, 10) ?? "no commit"), run.changed ? " with changes" : ""),
      ...data.modes.map((_, mode) => make("td", {}, LETTERS[program.lines[mode][place]] ? make("span", {class: `out ${cls(LETTERS[program.lines[mode][place]])}`}, LETTERS[program.lines[mode][place]]) : "-"))))))));
}
function opsOf(told, {names, missing}) {
  const counts = new Map();
  told.forEach((more, mode) => { for (const [op, count] of more?.ops ?? []) (counts.get(op) ?? counts.set(op, []).get(op))[mode] = count; });
  if (!counts.size) return null;
  const rows = [...counts].sort(([a], [b]) => missing[b] - missing[a] || names[a].localeCompare(names[b]));
  return make("details", {}, make("summary", {}, `Ops (${rows.length})`), make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th", {}, "op"), ...data.modes.map((mode) => make("th", {class: "n"}, mode)))),
    make("tbody", {}, ...rows.map(([op, given]) => make("tr", {}, make("td", {}, make("code", {class: missing[op] ? "warn" : null}, names[op]), missing[op] ? make("span", {class: "warn"}, " no kernel in TorchTPU 0.2.0") : null),
      ...data.modes.map((_, mode) => make("td", {class: "n"}, given[mode] ? number(given[mode]) : "")))))))); 
}

async function opsPage() {
  const shard_ = await load("ops"), told = make("div", {id: "told", class: "soft"}), place = make("div"), list = make("div");
  const only = make("select", {"aria-label": "ops", onchange: (event) => { keep({ops: event.target.value}); redraw(); }},
    ...[["", "every op"], ["missing", "ops that TorchTPU lacks"], ["way", "ops in the way of a program"]].map(([value, shown]) =>
      make("option", {value, selected: (here().query.ops ?? "") === value ? "" : null}, shown)));
  const search = make("input", {type: "search", placeholder: "op", "aria-label": "op", value: here().query.name ?? "",
    oninput: (event) => { keep({name: event.target.value}); redraw(); }});
  const plain = (op) => shard_.names[op].replace(/^aten\./, "").replace(/\.default$/, "");
  function redraw() {
    const {query} = here(), shown = [...filtered(query)].sort((a, b) => a.builder.localeCompare(b.builder) || a.task.localeCompare(b.task) || a.name.localeCompare(b.name));
    const way = new Map();
    for (const program of shown) for (const op of new Set(program.cells.flatMap((cell) => cell?.ops ?? []))) way.set(op, [...(way.get(op) ?? []), program]);
    const count = new Map();
    for (const program of shown) for (const op of shard_.used[program.place]) count.set(op, (count.get(op) ?? 0) + 1);
    const rows = [...count.keys()].filter((op) => shard_.names[op].toLowerCase().includes((query.name ?? "").toLowerCase()) &&
      (query.ops !== "missing" || shard_.missing[op]) && (query.ops !== "way" || way.has(plain(op))))
      .sort((a, b) => count.get(b) - count.get(a) || shard_.names[a].localeCompare(shard_.names[b]));
    told.textContent = `${number(rows.length)} ops against ${number(shown.length)} programs, in the order of package and task: point at a square`;
    place.replaceChildren(matrix({shard: shard_, rows}, shown, told));
    const listed = [...way].sort(([, a], [, b]) => b.length - a.length);
    list.replaceChildren(make("h2", {}, "Ops in the way"), listed.length ? make("div", {class: "scroll"}, make("table", {class: "narrow"},
      make("thead", {}, make("tr", {}, make("th", {}, "op"), make("th", {class: "n"}, "programs"), make("th", {}, "such as"))),
      make("tbody", {}, ...listed.map(([op, some]) => make("tr", {}, make("td", {}, make("code", {}, op)), make("td", {class: "n"}, link("programs", number(some.length), {op})),
        make("td", {}, ...some.slice(0, 6).flatMap((program) => [link(`program/${program.name}`, program.name), " "]))))))) : make("p", {class: "soft"}, "No program met an op that the device or TorchTPU lacks."));
  }
  const filters = filterBar(["package", "task", "mode", "status", "architecture"], redraw);
  filters.insertBefore(only, filters.lastChild);
  filters.insertBefore(search, only);
  const keyed = make("div", {class: "legend"}, ...[["pass", "runs in a program that passes"], ["mismatch", "runs in a program that fails"], ["unsupported", "TorchTPU 0.2.0 has no kernel of it"]]
    .map(([kind, name]) => make("span", {class: kind}, make("i"), name)));
  const made = make("div", {}, filters, keyed, told, place, list);
  queueMicrotask(redraw);
  return made;
}

function suspects(commits) {
  if (!commits?.length) return null;
  const listed = make("ul", {class: "commits"}, ...commits.slice(0, 60).map(({commit, subject}) => make("li", {}, make("code", {}, commit.slice(0, 10)), ` ${subject}`)),
    commits.length > 60 ? make("li", {class: "soft"}, `and ${commits.length - 60} more`) : null);
  return commits.length < 3 ? listed : make("details", {}, make("summary", {}, `the ${commits.length} commits between`), listed);
}

function changesPage() {
  const base = data.baseline;
  if (!base) return make("p", {class: "soft"}, "No earlier run of the same suite, chip and shard is in the history, and no --baseline was given.");
  const since = (bad) => bad ? make("td", {}, `run ${bad.run} `, bad.commit ? make("code", {}, bad.commit.slice(0, 10)) : "", bad.changed ? " with changes" : "",
    make("div", {class: "soft"}, `good in run ${bad.last_good.run}`, bad.last_good.commit ? [" ", make("code", {}, bad.last_good.commit.slice(0, 10))] : ""),
    suspects(bad.commits)) : make("td");
  const part = (kind) => [make("h2", {}, `${base[kind].length} ${kind}`), base[kind].length ? make("div", {class: "scroll"}, make("table", {},
    make("thead", {}, make("tr", {}, ...["program", "mode", "was", "is", ...(kind === "worse" ? ["first bad"] : []), "says"].map((name) => make("th", {}, name)))),
    make("tbody", {}, ...base[kind].map((entry) => make("tr", {}, make("td", {}, link(`program/${entry.program}`, entry.program)), make("td", {}, entry.mode),
      make("td", {}, make("span", {class: `out ${cls(entry.before)}`}, entry.before)),
      make("td", {}, make("span", {class: `out ${cls(entry.after)}`}, entry.after), entry.what === "status" ? "" : make("div", {class: "soft"}, "predicted to fail on the chip")),
      kind === "worse" ? since(entry.first_bad) : null, make("td", {class: "soft"}, (entry.error ?? "").split("\n")[0].slice(0, 240))))))) : null];
  return make("div", {}, make("p", {}, `Against run ${base.run}`, base.commit ? [", ", make("code", {}, base.commit.slice(0, 10))] : "", `, ${base.started}. `,
    link("programs", "The programs that became worse", {changed: "worse"})), ...part("worse"), ...part("better"));
}

function trendsPage() {
  if (!data.runs.length) return make("p", {class: "soft"}, "This report was made without a history.");
  const chosen = here().query.mode ?? data.modes[0], picked = data.modes.includes(chosen) ? chosen : data.modes[0];
  const pick = make("div", {class: "filters"}, make("select", {"aria-label": "mode", onchange: (event) => { keep({mode: event.target.value}); show(); }},
    ...data.modes.map((mode) => make("option", {value: mode, selected: mode === picked ? "" : null}, mode))));
  const rows = [...data.runs].reverse().map((run) => make("tr", {}, make("td", {class: "n"}, `${run.run}`), make("td", {class: "once"}, run.started.replace("T", " ").slice(0, 16)),
    make("td", {}, make("code", {}, run.commit?.slice(0, 10) ?? "unknown"), run.changed ? " with changes" : ""), make("td", {class: "once"}, `emutpu ${run.emutpu}, torch ${run.torch}`),
    ...TIERS.slice(0, 4).map((tier) => { const counts = run.by_mode[picked]?.[tier]; return make("td", {class: "n"}, counts ? share(...counts.rows) : "-"); }),
    make("td", {class: "n"}, number(run.programs)), make("td", {class: "n"}, `${(run.seconds / 60).toFixed(1)} min`)));
  return make("div", {}, pick, data.runs.length > 1 ? trendChart(picked) : make("p", {class: "soft"}, "One run so far: a line needs two of the same suite, chip and shard."),
    make("h2", {}, "Runs of this suite"), make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {},
      ...["run", "started", "commit", "versions", ...TIERS.slice(0, 4).map((tier) => data.tiers[tier]), "answers", "worked"].map((name, place) => make("th", {class: place === 0 || place > 3 ? "n" : null}, name)))), make("tbody", {}, ...rows))));
}

function gatesPage() {
  const all = (name) => programs.flatMap((program) => program.cells.map((cell) => cell?.numbers[at[name]] ?? null)).filter((value) => value !== null);
  const middle = (list, part) => (list.length ? [...list].sort((a, b) => a - b)[Math.min(list.length - 1, Math.floor(list.length * part))] : null);
  const measured = [["the answer: device against CPU", "max_rel_error"], ["the answer: CPU's float32 against float64", "logit_noise"], ["the gradients: device against CPU", "gradient_error"],
    ["the gradients: CPU's float32 against float64", "gradient_noise"], ["the answer at default precision", "default_error"]].map(([name, field]) => [name, field, all(field)]).filter(([, , list]) => list.length);
  const parts = [make("h2", {}, "Limits and noise"), measured.length ? make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, make("th", {}, "relative error of"), ...["programs", "middle", "90 %", "99 %", "most", "limit", "above"].map((name) => make("th", {class: "n"}, name)))),
    make("tbody", {}, ...measured.map(([name, field, list]) => make("tr", {}, make("td", {}, name), make("td", {class: "n"}, number(list.length)),
      ...[0.5, 0.9, 0.99, 1].map((part) => make("td", {class: "n"}, small(middle(list, part)))), make("td", {class: "n"}, data.limits[field] ? data.limits[field].toExponential(0) : ""),
      make("td", {class: "n"}, data.limits[field] ? number(list.filter((value) => value > data.limits[field]).length) : "")))))) : make("p", {class: "soft"}, "Nothing was measured."),
  make("div", {class: "columns"}, ...[["Error of the answer", "max_rel_error", "logit_noise"], ["Error of the gradients", "gradient_error", "gradient_noise"]].map(([title, field, noise]) =>
    distribution(title, [{name: "device against CPU", values: all(field)}, {name: "CPU against float64", values: all(noise)}].filter((series) => series.values.length), data.limits[field])))];
  for (const [reason, count] of Object.entries(data.without_float64)) parts.push(make("p", {class: "soft"}, `Without float64, ${number(count)}: ${reason}`));
  if (data.perplexity.length) parts.push(make("h2", {}, "Perplexity of trained models"), make("div", {class: "scroll"}, make("table", {class: "narrow"},
    make("thead", {}, make("tr", {}, ...["program", "mode", "CPU", "device", "default precision"].map((name, place) => make("th", {class: place > 1 ? "n" : null}, name)))),
    make("tbody", {}, ...data.perplexity.map(({program, mode, cpu, device, default: at_default}) => make("tr", {}, make("td", {}, link(`program/${program}`, program)), make("td", {}, mode),
      ...[cpu, device, at_default].map((value) => make("td", {class: "n"}, value?.toFixed(4) ?? "-"))))))));
  if (data.bounded) parts.push(make("h2", {}, "Bounded lengths"), make("p", {}, make("b", {}, share(data.bounded.passed.rows, data.bounded.attempted.rows)),
    ` of ${number(data.bounded.attempted.rows)} rows and ${share(data.bounded.passed.programs, data.bounded.attempted.programs)} of ${number(data.bounded.attempted.programs)} programs of causal language models, compiled for several lengths at once. Executables a program: `,
    Object.entries(data.bounded.executables).map(([count, some]) => `${count} in ${number(some)}`).join(", "), "."));
  const found = data.mutations;
  parts.push(make("h2", {}, "Can the gate fail?"), found ? make("div", {}, make("p", {}, make("b", {}, share(found.caught, found.injected)), ` of ${number(found.injected)} faults, each in one call of one op, in ${number(found.programs)} programs would be caught by tier 2.`),
    make("div", {class: "scroll"}, make("table", {class: "narrow"}, make("tbody", {}, ...Object.entries(found.by_fault).map(([fault, counts]) => make("tr", {}, make("td", {}, fault),
      make("td", {class: "n"}, `${counts.caught} of ${counts.injected}`), make("td", {class: "n"}, share(counts.caught, counts.injected))))))),
    found.missed.length ? make("p", {class: "soft"}, `Missed: ${found.missed.join("; ")}`) : null) : make("p", {class: "soft"}, "emutpu conformance mutate has not run with this manifest."));
  const bugs = programs.filter((program) => program.cells.some((cell) => cell?.status === "corpus bug"));
  parts.push(make("h2", {}, `${number(bugs.length)} defects of the suite: programs that fail on the CPU too`), bugs.length ? make("div", {class: "scroll"}, make("table", {}, make("tbody", {},
    ...bugs.slice(0, 400).map((program) => make("tr", {}, make("td", {}, link(`program/${program.name}`, program.name)), make("td", {class: "soft"}, firstError(program, modesOf({}))))))) ) : null,
  bugs.length > 400 ? make("p", {}, link("programs", "all of them", {status: "corpus bug"})) : null);
  return make("div", {}, ...parts);
}

async function modelPage(id) {
  const program = programs.find((each) => each.models.some((model) => model.id === id));
  return program ? programPage(program.name, id) : make("p", {}, `No model is called ${id}.`);
}

const VIEWS = {
  programs: () => programTable(), program: (name) => programPage(name), model: modelPage, ops: opsPage, changes: changesPage, trends: trendsPage, gates: gatesPage,
  packages: packages.list, package: packages.page, tasks: tasks.list, task: tasks.page, architectures: families.list, architecture: families.page,
};
const TAB = {program: "programs", model: "programs", package: "packages", task: "tasks", architecture: "architectures"};
let turn = 0;
async function show() {
  const mine = ++turn, {view: wanted, name} = here(), root = document.documentElement;
  root.dataset.ready = "no";
  for (const tab of document.querySelectorAll("nav a")) tab.classList.toggle("here", tab.dataset.view === (TAB[wanted] ?? wanted));
  let made = null;
  if (wanted in VIEWS) {
    try {
      made = await VIEWS[wanted](name);
    } catch (error) {
      made = make("p", {class: "bad"}, `${error.message ?? error}`);
    }
  }
  if (mine !== turn) return;
  overview.hidden = made !== null;
  view.hidden = made === null;
  view.replaceChildren(...(made ? [made] : []));
  root.dataset.ready = "yes";
}
document.getElementById("outcomes").append(make("h2", {}, "Outcomes by package"), outcomesLegend(), make("div", {class: "scroll"}, make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "package"), make("th", {class: "n"}, "programs"),
  ...data.modes.map((mode) => make("th", {}, mode)))), make("tbody", {}, ...values("builder").map((name) => {
  const some = programs.filter((program) => program.builder === name);
  return make("tr", {}, make("td", {}, link(`package/${name}`, name)), make("td", {class: "n"}, number(some.length)), ...data.modes.map((_, mode) => make("td", {style: "width: 28%; vertical-align: middle"}, bar(some, mode))));
})))));
addEventListener("hashchange", () => { scrollTo(0, 0); show(); });
show();
