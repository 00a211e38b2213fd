"use strict";

// The row of what runs on no GPU.
const CPU = -1;
const FONT = { family: 'system-ui, "Segoe UI", Roboto, Arial, sans-serif', size: 12, color: "#1a1a1a" };
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };

const seconds = (micro) => micro / 1e6;
const shown = (micro) => {
  const value = seconds(micro);
  return value.toFixed(Math.abs(value) < 1 ? 4 : 2);
};
const number = (value) => value.toLocaleString("en-US");
const bytes = (value) => value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : `${(value / 1e6).toFixed(1)} MB`;

// A step's arrays as objects; scripts/timeline.py (compact) says what stands where.
function unpack(run, step, looks) {
  const actors = [];
  for (let i = 0; i < step.actors.length; i += 4) {
    const [gpus, assigned, completed, tokens] = step.actors.slice(i, i + 4);
    actors.push({ gpus: run.gpu_sets[gpus], assigned, completed, tokens });
  }
  const spans = [];
  for (let i = 0; i < step.spans.length; i += 5) {
    const [f, l, g, start, length] = step.spans.slice(i, i + 5);
    const name = run.functions[f], look = looks[l];
    const actor = look.name === "decode" ? actors[Number(name.split(".")[1])] : null;
    spans.push({ name, look, actor, gpus: run.gpu_sets[g], start, end: start + length });
  }
  const moves = [];
  for (let i = 0; i < step.moves.length; i += 6) {
    const [source, target, responses, kv, sent, ready] = step.moves.slice(i, i + 6);
    moves.push({ source, target, responses, kv, sent, ready });
  }
  return { actors, spans, moves };
}

function details(span) {
  const lines = [`<b>${span.name}</b>: ${span.look.label}`];
  lines.push(span.gpus.length ? `GPU ${span.gpus.join(", ")}` : "CPU");
  lines.push(`${shown(span.start)} s to ${shown(span.end)} s, ${shown(span.end - span.start)} s`);
  if (span.actor) {
    lines.push(`${number(span.actor.assigned)} responses assigned`);
    if (span.actor.completed >= 0) {
      lines.push(`${number(span.actor.completed)} completed here, of ${number(span.actor.tokens)} tokens`);
    }
  }
  return lines.join("<br>");
}

// A faint bar for every row, under what runs there.
function freeTrace(rows, [first, last]) {
  const y = [...rows.values()];
  return { type: "bar", orientation: "h", base: y.map(() => first), x: y.map(() => last - first), y, width: 0.84,
    hoverinfo: "skip", marker: { color: "#f4f4f2" } };
}

// Bars of one look share a trace, thin ones last, so that they lie on top.
function barTraces(spans, looks, rows) {
  const traces = new Map(looks.map((look) => [look, { type: "bar", orientation: "h", name: look.label, base: [], x: [],
    y: [], text: [], customdata: [], hovertemplate: "%{customdata}<extra></extra>", width: look.thin ? 0.24 : 0.84,
    offset: look.thin ? 0.18 : -0.42, textposition: "inside", insidetextanchor: "start", textangle: 0,
    textfont: { size: 11, color: look.name === "prefill" ? "#fff" : "#000" },
    marker: { color: look.color, line: { color: "#444", width: look.thin ? 0 : 0.6 },
      pattern: { shape: look.pattern, fgcolor: look.ink, bgcolor: look.color, size: 7, solidity: 0.25 } } }]));
  for (const span of spans) {
    const trace = traces.get(span.look), told = details(span);
    (span.gpus.length ? span.gpus : [CPU]).forEach((gpu, i) => {
      trace.base.push(seconds(span.start));
      trace.x.push(seconds(span.end - span.start));
      trace.y.push(rows.get(gpu));
      trace.customdata.push(told);
      trace.text.push(i === 0 && span.look.busy ? span.name.replace("decode.", "decode ") : "");
    });
  }
  return [...traces.values()].filter((trace) => trace.x.length);
}

function moveTraces(data, color, rows) {
  if (!data.moves.length) return [];
  const line = { type: "scatter", mode: "lines", x: [], y: [], hoverinfo: "skip",
    line: { color: color, width: 1.4 } };
  const ends = { type: "scatter", mode: "markers", name: "migration", x: [], y: [], customdata: [],
    hovertemplate: "%{customdata}<extra></extra>",
    marker: { color: color, size: [], symbol: [], line: { color: "#fff", width: 1 } } };
  for (const move of data.moves) {
    const from = rows.get(data.actors[move.source].gpus[0]), to = rows.get(data.actors[move.target].gpus[0]);
    const told = `<b>${number(move.responses)} responses migrate</b><br>actor ${move.source} to actor ${move.target}<br>` +
      `${shown(move.sent)} s to ${shown(move.ready)} s, ${shown(move.ready - move.sent)} s<br>` +
      (move.kv ? `${bytes(move.kv)} of KV` : "no KV sent");
    line.x.push(seconds(move.sent), seconds(move.ready), null);
    line.y.push(from, to, null);
    ends.x.push(seconds(move.sent), seconds(move.ready));
    ends.y.push(from, to);
    ends.marker.size.push(6, 10);
    ends.marker.symbol.push("circle", to > from ? "triangle-down" : "triangle-up");
    ends.customdata.push(told, told);
  }
  return [line, ends];
}

function rowsOf(run, data) {
  const rows = new Map();
  for (let gpu = 0; gpu < run.nodes * run.gpus_per_node; gpu += 1) {
    rows.set(gpu, gpu + Math.floor(gpu / run.gpus_per_node) * 0.5);
  }
  if (data.spans.some((span) => !span.gpus.length)) {
    rows.set(CPU, run.nodes * (run.gpus_per_node + 0.5));
  }
  return rows;
}

function layoutOf(run, step, rows, range) {
  const per = run.gpus_per_node, last = Math.max(...rows.values());
  const height = rows.size <= 24 ? 22 : rows.size <= 80 ? 14 : 10;
  const marks = [[0, "weights exist"], [step.generated, "generated"], [step.ended, "step ends"]];
  const nodes = Array.from({ length: run.nodes }, (_, node) => node);
  return {
    height: 92 + height * (last + 1), margin: { l: 118, r: 20, t: 34, b: 44 }, font: FONT, showlegend: false,
    uniformtext: { mode: "hide", minsize: 9 }, hovermode: "closest", dragmode: "zoom", barmode: "overlay", plot_bgcolor: "#fff", paper_bgcolor: "#fff",
    hoverlabel: { bgcolor: "#fff", bordercolor: "#444", font: FONT, align: "left" },
    xaxis: { title: { text: "seconds since the new weights" }, range, gridcolor: "#e8e8e8", zeroline: false,
      showline: true, linecolor: "#888" },
    yaxis: { tickvals: [...rows.values()], ticktext: [...rows.keys()].map((gpu) => gpu === CPU ? "CPU" : `GPU ${gpu}`),
      range: [last + 0.6, -0.6], showgrid: false, zeroline: false, tickfont: { size: height > 12 ? 11 : 8 } },
    shapes: marks.map(([at]) => ({ type: "line", xref: "x", yref: "paper", x0: seconds(at), x1: seconds(at),
      y0: 0, y1: 1, line: { color: "#000", width: 1, dash: "dot" } })),
    annotations: marks.map(([at, text], i) => ({ x: seconds(at), y: 1, xref: "x", yref: "paper", yanchor: "bottom",
      xanchor: ["left", "center", "right"][i], showarrow: false, text, font: { size: 11 } }))
      .concat(nodes.map((node) => ({ x: 0, xshift: -66, y: rows.get(node * per) + (per - 1) / 2, xref: "paper",
        xanchor: "right", showarrow: false, text: `node ${node}` }))),
  };
}

function keyOf(list, looks, color, prefix) {
  const marks = { "/": "M0 14L14 0M-4 4L4 -4M10 18L18 10", "\\": "M0 0L14 14M-4 10L4 18M10 -4L18 4",
    x: "M2 2L12 12M12 2L2 12", "-": "M0 4H26M0 10H26", ".": "M4 4h2v2h-2zM10 9h2v2h-2z" };
  const drawn = looks.map((look, i) => {
    const box = look.thin ? '<rect y="8" width="26" height="4"' : '<rect y=".5" x=".5" width="25" height="13" stroke="#444"';
    const over = look.pattern ? `<pattern id="${prefix}-${i}" width="14" height="14" patternUnits="userSpaceOnUse">` +
      `<path d="${marks[look.pattern]}" stroke="${look.ink}" stroke-width="1.5"/></pattern>` +
      `<rect x=".5" y=".5" width="25" height="13" fill="url(#${prefix}-${i})"/>` : "";
    return [look.label, `${box} fill="${look.color}"/>${over}`];
  });
  drawn.push(["responses migrate", `<path d="M2 3L20 11" stroke="${color}" stroke-width="1.5"/>` +
    `<path d="M17 5l6 0l-3 7z" fill="${color}"/>`]);
  list.innerHTML = drawn.map(([label, mark]) =>
    `<li><svg width="26" height="14" aria-hidden="true">${mark}</svg>${label}</li>`).join("");
}

function fill(select, values, label = String) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => new Option(label(value), value)));
  if (values.map(String).includes(before)) select.value = before;
}

class TimelinePanel {
  constructor(element, number) {
    const block = JSON.parse(element.querySelector(".timeline-data").textContent);
    this.runs = block.runs;
    this.form = element.querySelector("form");
    this.charts = element.querySelector(".charts");
    this.table = element.querySelector("details .scroll");
    element.querySelector(".left-out").textContent = block.seeds_left_out
      ? ` To keep the file small, the last ${block.seeds_left_out} seeds are not in it.` : "";
    this.looks = block.looks;
    this.color = block.migration_color;
    keyOf(element.querySelector(".key"), this.looks, this.color, `key-${number}`);
    const policies = [...new Set(this.runs.map((run) => run.policy))];
    fill(this.form.policy, policies);
    fill(this.form.second, ["", ...policies], (name) => name || "nothing");
    if (policies.length > 1) this.form.second.value = policies.includes("rlhfless") && policies[0] !== "rlhfless"
      ? "rlhfless" : policies[1];
    fill(this.form.seed, [...new Set(this.runs.map((run) => run.seed))].sort((a, b) => a - b));
    this.form.addEventListener("change", () => this.draw());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    for (const [name, way] of [["back", -1], ["forward", 1]]) {
      this.form[name].addEventListener("click", () => {
        this.form.step.selectedIndex += way;
        this.draw();
      });
    }
    this.draw();
  }

  draw() {
    const seed = Number(this.form.seed.value);
    const names = [...new Set([this.form.policy.value, this.form.second.value])].filter(Boolean);
    // Not every policy need have run with every seed.
    const runs = names.map((name) => this.runs.find((run) => run.policy === name && run.seed === seed) ||
      this.runs.find((run) => run.policy === name));
    fill(this.form.step, runs[0].steps.map((step) => step.step));
    const chosen = this.form.step;
    this.form.back.disabled = chosen.selectedIndex === 0;
    this.form.forward.disabled = chosen.selectedIndex === chosen.length - 1;
    const drawn = runs.map((run) => ({ run, step: run.steps.find((step) => step.step === Number(chosen.value)) }))
      .filter(({ step }) => step).map(({ run, step }) => ({ run, step, data: unpack(run, step, this.looks) }));
    // Two runs below each other share the scale of time.
    const first = Math.min(0, ...drawn.flatMap(({ data }) => data.spans.map((span) => span.start)));
    const last = Math.max(...drawn.map(({ step }) => step.ended));
    const range = [seconds(first - 0.01 * last), seconds(last * 1.01)];
    while (this.charts.children.length > drawn.length) {
      Plotly.purge(this.charts.lastChild.querySelector(".plot"));
      this.charts.lastChild.remove();
    }
    drawn.forEach(({ run, step, data }, i) => {
      if (!this.charts.children[i]) {
        this.charts.insertAdjacentHTML("beforeend",
          '<div class="run"><h3></h3><p></p><div class="plot timeline-plot" role="img"></div></div>');
      }
      const [title, line, plot] = this.charts.children[i].children;
      const held = (chosen) => seconds(data.spans.filter((span) => chosen(span.look))
        .reduce((sum, span) => sum + span.gpus.length * (span.end - span.start), 0)).toFixed(1);
      title.textContent = `${run.policy}, step ${step.step}, seed ${run.seed}`;
      line.textContent = `step ${shown(step.ended)} s, generation ${shown(step.generated)} s, ` +
        `${data.actors.length} actors; GPU seconds: ${held((look) => look.busy)} busy, ` +
        `${held((look) => look.name === "startup")} starting, ` +
        `${held((look) => ["wait", "idle"].includes(look.name))} held without work; ` +
        `${number(data.moves.reduce((sum, move) => sum + move.responses, 0))} responses migrated`;
      plot.setAttribute("aria-label", `Timeline of ${title.textContent}: ${line.textContent}`);
      const rows = rowsOf(run, data);
      Plotly.react(plot, [freeTrace(rows, range), ...barTraces(data.spans, this.looks, rows),
        ...moveTraces(data, this.color, rows)],
        layoutOf(run, step, rows, [...range]), CONFIG);
    });
    this.fillTable(drawn);
  }

  fillTable(drawn) {
    const table = document.createElement("table");
    const line = (part, tag, cells) => {
      const row = part.insertRow();
      cells.forEach((text, i) => {
        const cell = document.createElement(tag);
        cell.textContent = text;
        if (i < 4) cell.className = "text";
        row.append(cell);
      });
    };
    line(table.createTHead(), "th", ["policy", "function", "what", "GPUs", "from s", "to s", "GPU s"]);
    const body = table.createTBody();
    for (const { run, data } of drawn) {
      for (const span of data.spans) {
        line(body, "td", [run.policy, span.name, span.look.label, span.gpus.join(", ") || "CPU", shown(span.start),
          shown(span.end), shown(span.gpus.length * (span.end - span.start))]);
      }
    }
    this.table.replaceChildren(table);
  }
}

for (const block of document.querySelectorAll(".chart-data")) {
  const { data, layout } = JSON.parse(block.textContent);
  Plotly.newPlot(block.dataset.for, data, { font: FONT, paper_bgcolor: "#fff", plot_bgcolor: "#fff", ...layout }, CONFIG);
}
document.querySelectorAll(".timeline-panel").forEach((element, i) => new TimelinePanel(element, i));
