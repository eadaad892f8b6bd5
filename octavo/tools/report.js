// Fills the report: every chart of the run, the heat map and the table, from the JSON that report.py put in #data.
"use strict";

const data = JSON.parse(byId("data").textContent);
const OPERANDS = { a: "left", b: "right", x: "input", w: "weight", g: "gradient" };
const ZERO_CODE = -99999; // as in charts.py
const HEAT_ROWS = 24;
const HEAT_DECADES = 6; // the palest cell is a share of 1e-6
const HEAT = {
  saturated: { reading: 2, series: "s1", text: "Share of values clipped to the format’s largest number" },
  underflow: { reading: 3, series: "s0", text: "Share of non-zero values that became zero" },
  rescaled: { reading: 4, series: "s2", text: "Share of uses that a delayed scale did not hold: they took their own" },
};

const decode = (code) => (code === null ? null : code === ZERO_CODE ? 0 : 10 ** (code / 1000));
const steps = data.scaling.steps;
const operands = data.scaling.rows.map(({ product, operand, series, last }) => {
  const values = series.map((codes) => (Array.isArray(codes) ? codes : steps.map(() => codes)).map(decode));
  return { product, operand, last, values, worst: values.map((readings) => Math.max(0, ...readings)) };
});
const products = new Map(); // name -> its operands, in the order the run first used them
for (const operand of operands) {
  if (!products.has(operand.product)) products.set(operand.product, []);
  products.get(operand.product).push(operand);
}

function keepWhatApplies() {
  const holds = {
    compared: data.runs.length > 1,
    emulated: data.emulated,
    sample: data.sample,
    scaling: operands.length > 0,
    table: operands.length + data.products.length > 0,
  };
  for (const node of document.querySelectorAll("[data-if]")) if (!holds[node.dataset.if]) node.remove();
}

function showLoss() {
  const raw = data.runs.map(({ name, lines }, i) => ({ name, series: i, weight: "faint", ...lines.loss }));
  // BF16 comes last and is dashed, so that both colours show where the lines coincide.
  const averages = data.runs.map(({ name, lines }, i) => {
    return { name: `${name} average`, series: i, dash: i, ...lines.smooth };
  });
  const lines = [...raw, ...averages];
  const marks = data.runs.flatMap(({ name, lost, skipped }) => [
    { kind: "lost", name: `${name} loss not finite`, spans: lost },
    { kind: "skipped", name: `${name} update skipped`, spans: skipped },
  ]);
  const counted = (key) => data.runs.filter((run) => run[key] > 0).map((run) => `${run.name}: ${run[key]}`).join(", ");
  const entries = data.runs.map(({ name }, i) => ({ name, series: i, dash: i }));
  if (counted("lostCount")) entries.push({ name: `loss not finite (${counted("lostCount")})`, mark: "lost" });
  if (counted("skippedCount")) entries.push({ name: `update skipped (${counted("skippedCount")})`, mark: "skipped" });
  legend(byId("loss-legend"), entries);
  const sorted = lines.flatMap(({ y }) => y).filter((value) => value > 0).sort((p, q) => p - q);
  const wide = sorted.length > 0 && sorted[sorted.length - 1] > 50 * sorted[0]; // a run that exploded
  toggle(byId("loss-axis"), { linear: "linear", log: "log" }, wide ? "log" : "linear", (axis) => {
    lineChart(byId("loss"), { lines, marks, log: axis === "log", format: number, height: 340, label: "loss by step" });
  });
}

function showSmallCharts() {
  const draw = (key, axis, label) => {
    const lines = data.runs.map((run, i) => ({ name: run.name, series: i, weight: "thin", ...run.lines[key] }));
    lineChart(byId(key), { lines: lines.reverse(), format: number, label, ...axis }); // the run itself on top
  };
  draw("lr", { zero: true }, "learning rate by step");
  draw("grad_norm", { log: true }, "gradient norm by step");
  draw("tokens_per_s", { zero: true }, "tokens per second by step");
  if (data.difference) {
    legend(byId("runs-legend"), data.runs.map(({ name }, i) => ({ name, series: i })));
    const line = { name: "difference", series: 0, weight: "thin", ...data.difference };
    const label = "relative difference in loss by step";
    lineChart(byId("difference"), { lines: [line], zero: true, format: signedPercent, label });
  }
}

function showProduct(name) {
  byId("product").value = name;
  const shown = products.get(name);
  const words = ({ operand }) => (OPERANDS[operand] ? `${operand} (${OPERANDS[operand]})` : operand);
  legend(byId("operand-legend"), shown.map((operand, i) => ({ name: words(operand), series: i % 4, dash: i % 4 })));
  ["scale", "amax", "saturated", "underflow"].forEach((reading, r) => {
    const lines = shown.map((operand, i) => ({
      name: words(operand), series: i % 4, dash: i % 4, x: steps, y: operand.values[r],
    }));
    const share = r >= 2;
    const label = `${reading} of ${name} by step`;
    lineChart(byId(`reading-${r}`), { lines, log: !share, zero: share, format: share ? percent : number, label });
  });
}

function openProduct(name) {
  byId("product-filter").value = "";
  fillPicker();
  showProduct(name);
  byId("one-product").scrollIntoView({ behavior: "smooth" });
}

function fillPicker() {
  const wanted = byId("product-filter").value.toLowerCase();
  const names = [...products.keys()].filter((name) => name.toLowerCase().includes(wanted));
  const select = byId("product");
  const before = select.value;
  select.replaceChildren();
  for (const name of names) make(select, "option", { value: name }, name);
  if (names.includes(before)) select.value = before;
  else if (names.length) showProduct(names[0]);
}

function showPicker() {
  fillPicker();
  const select = byId("product");
  const move = (by) => {
    const index = select.selectedIndex + by;
    if (index >= 0 && index < select.options.length) showProduct(select.options[index].value);
  };
  select.addEventListener("change", () => showProduct(select.value));
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  byId("product-filter").addEventListener("input", fillPicker);
  const tightest = [...operands].sort((p, q) => q.worst[2] - p.worst[2] || q.worst[3] - p.worst[3])[0];
  showProduct(tightest.product);
}

const middleCut = (text, length) => {
  const half = Math.floor((length - 1) / 2);
  return text.length <= length ? text : `${text.slice(0, half)}…${text.slice(text.length - half)}`;
};

function showHeat(kind) {
  const { reading, text } = HEAT[kind];
  const affected = operands.filter(({ worst }) => worst[reading] > 0);
  const rows = affected.sort((p, q) => q.worst[reading] - p.worst[reading]).slice(0, HEAT_ROWS);
  const all = affected.length === rows.length;
  const which = all ? "every affected operand, worst first" : `the ${HEAT_ROWS} worst of ${affected.length} affected`;
  byId("heat-caption").textContent =
    `${text}: ${which}, each column the worst reading of a stretch of steps. Every tenfold step in the share makes ` +
    "a cell stronger by the same amount; blank is zero. Click a name to see that product above.";
  const host = byId("heat");
  redraw.set(host, () => {
    host.replaceChildren();
    if (rows.length === 0) make(host, "div", { class: "empty" }, "It was zero in every reading.");
    else drawHeat(host, rows, kind);
  });
  redraw.get(host)();
}

const heatStrength = (share) => (share > 0 ? Math.max(0.05, Math.min(1, 1 + Math.log10(share) / HEAT_DECADES)) : 0);

function drawHeat(host, rows, kind) {
  const { reading, series } = HEAT[kind];
  const width = Math.max(260, host.clientWidth);
  const left = Math.min(270, width * 0.36);
  const [rowHeight, cell] = [19, (width - left - 2) / steps.length];
  const viewBox = `0 0 ${width} ${rows.length * rowHeight + 58}`;
  const svg = make(host, "svg", { viewBox, role: "img", "aria-label": `${kind} by operand and step`, class: series });
  rows.forEach((row, i) => {
    const y = i * rowHeight;
    const name = middleCut(`${row.product}.${row.operand}`, Math.floor((left - 10) / 7));
    const label = make(svg, "text", { class: "row", x: left - 8, y: y + 13.5, "text-anchor": "end" }, name);
    label.addEventListener("click", () => openProduct(row.product));
    make(svg, "rect", { x: left, y, width: cell * steps.length, height: rowHeight - 2, fill: "var(--tint)" });
    row.values[reading].forEach((share, j) => {
      if (!share) return;
      const box = { x: left + j * cell, y, width: cell + 0.3, height: rowHeight - 2, fill: "var(--s)" };
      make(svg, "rect", { ...box, "fill-opacity": heatStrength(share).toFixed(3) });
    });
  });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const scale = width / box.width;
    const row = rows[Math.floor(((event.clientY - box.top) * scale) / rowHeight)];
    const j = Math.floor(((event.clientX - box.left) * scale - left) / cell);
    byId("tip").hidden = true;
    if (!row || j < 0 || j >= steps.length) return;
    const share = `${percent(row.values[reading][j])} ${kind}`;
    showTip(event, `${row.product}.${row.operand}`, [[`step ${steps[j].toLocaleString("en")}`, share, ""]]);
  });
  svg.addEventListener("pointerleave", () => (byId("tip").hidden = true));
  drawHeatKey(svg, left, width, rows.length * rowHeight + 16, cell);
}

function drawHeatKey(svg, left, width, y, cell) {
  make(svg, "text", { x: left - 8, y, "text-anchor": "end" }, "step");
  for (let j = 0; j < steps.length; j += Math.max(1, Math.ceil(64 / cell))) {
    make(svg, "text", { x: left + j * cell, y }, steps[j].toLocaleString("en"));
  }
  const box = Math.min(60, (width - left) / (HEAT_DECADES + 1));
  const every = box < 45 ? 3 : 2;
  for (let decade = 0; decade <= HEAT_DECADES; decade++) {
    const share = 10 ** (decade - HEAT_DECADES);
    const x = left + decade * box;
    make(svg, "rect", { x, y: y + 10, width: box, height: 10, fill: "var(--s)", "fill-opacity": heatStrength(share) });
    if (decade % every) continue;
    const end = decade === HEAT_DECADES ? { x: x + box, "text-anchor": "end" } : { x };
    make(svg, "text", { ...end, y: y + 34 }, percent(share));
  }
}

function tableRows() {
  const described = new Map(data.products.map((product) => [product.name, product]));
  const row = (name, operand) => {
    const { precision = "fp8", reason = "", formats, shapes, op, where, calls } = described.get(name) ?? {};
    const detail = [op, where, shapes, formats, calls && `${calls} calls`].filter(Boolean).join(" · ");
    const [scale, amax, , underflow] = operand?.last ?? [null, null, null, null];
    const [, , mostSaturated, mostUnderflow, mostRescaled] = operand?.worst ?? [null, null, null, null, null];
    const readings = { scale, amax, mostSaturated, underflow, mostUnderflow, mostRescaled };
    return { name, detail, operand: operand?.operand ?? "", precision, reason, ...readings };
  };
  const watched = operands.map((operand) => row(operand.product, operand));
  return [...watched, ...data.products.filter(({ name }) => !products.has(name)).map(({ name }) => row(name))];
}

const TABLE = [
  // key, heading, how a number is written (a column without is text)
  ["name", "Product"], ["operand", "Operand"], ["scale", "Scale", number], ["amax", "Amax", number],
  ["mostSaturated", "Saturated", percent], ["mostRescaled", "Rescaled", percent], ["underflow", "Underflow", percent],
  ["mostUnderflow", "at worst", percent], ["precision", "Precision"],
];

function showTable() {
  const [head, body] = [byId("table").tHead, byId("table").tBodies[0]];
  const rows = tableRows().map((row) => ({ row, node: tableRow(body, row) }));
  const headings = make(head, "tr");
  for (const [key, text, format] of TABLE) {
    const heading = make(headings, "th", { scope: "col", tabindex: 0, class: format ? "number" : "" }, text);
    const sort = () => {
      const before = heading.getAttribute("aria-sort");
      const down = before ? before === "ascending" : Boolean(format); // at first, numbers from the largest, text from A
      for (const other of headings.children) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      sortRows(rows, key, down);
      body.append(...rows.map(({ node }) => node));
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  }
  byId("table-filter").addEventListener("input", ({ target }) => {
    const wanted = target.value.toLowerCase();
    for (const { node } of rows) node.hidden = !node.textContent.toLowerCase().includes(wanted);
  });
}

function sortRows(rows, key, down) {
  const missing = ({ row }) => row[key] === null || row[key] === ""; // these stay at the end either way
  const order = (p, q) => (typeof p === "number" ? p - q : p.localeCompare(q, "en", { numeric: true }));
  rows.sort((p, q) => {
    if (missing(p) || missing(q)) return missing(p) - missing(q);
    return down ? order(q.row[key], p.row[key]) : order(p.row[key], q.row[key]);
  });
}

function tableRow(body, row) {
  const node = make(body, "tr");
  for (const [key, heading, format] of TABLE) {
    const cell = make(node, "td", { class: format ? "number" : "", "data-label": heading }); // shown on phones
    if (key === "name" && products.has(row.name)) {
      const button = make(cell, "button", { type: "button" }, row.name);
      button.addEventListener("click", () => openProduct(row.name));
    } else {
      cell.textContent = format ? format(row[key], 3) : row[key];
    }
    const below = { name: row.detail, precision: row.reason }[key];
    if (below) make(cell, "small", {}, below);
  }
  return node;
}

keepWhatApplies();
showLoss();
showSmallCharts();
if (operands.length) {
  showPicker();
  const saturates = operands.some(({ worst }) => worst[2] > 0);
  const kinds = { saturated: "saturation", underflow: "underflow", rescaled: "rescaled" };
  toggle(byId("heat-kind"), kinds, saturates ? "saturated" : "underflow", showHeat);
}
if (byId("table")) showTable();
let drawnAt = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === drawnAt) return; // phones resize the height whenever their address bar hides
  drawnAt = innerWidth;
  for (const draw of redraw.values()) draw();
});
