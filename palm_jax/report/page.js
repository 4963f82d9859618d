// Draws the panels of a report with Plotly. One range of steps, one cursor for all of them.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const ARRAYS = { i4: Int32Array, u1: Uint8Array, f4: Float32Array, f8: Float64Array };
  const BLUE = "#0072b2", BAND = "#8fc1de", ORANGE = "#e69f00", BAD = "#d55e00", GREY = "#9aa3ad";
  // Okabe and Ito's colours, and a dash of its own for each: print and eyes may lack colour.
  const MARKS = {
    rollback: { color: "#cc79a7", dash: "solid", width: 3.5 },
    intervention: { color: "#000000", dash: "dash" },
    promotion: { color: "#009e73", dash: "longdash" },
    resumed: { color: "#56b4e9", dash: "dot" },
    exclusion: { color: "#009e73", dash: "dashdot" },
    ramp: { color: "#8a8a8a", dash: "dot" },
    incident: { color: BAD, dash: "dash" },
    alarm: { color: "#56b4e9", symbol: "triangle-up-open", at: 0.05 },
    skipped: { color: "#000000", symbol: "line-ns-open", at: 0.02 },
  };
  const MARGIN = { l: 58, r: 12, t: 6, b: 28 };
  const HEAT_MARGIN = { l: 58, r: 66, t: 6, b: 28 };
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const [first, last] = report.steps;
  const pad = Math.max(0.5, 0.015 * (last - first));
  const state = { range: null, abandoned: false, hidden: new Set() };
  const whole = () => state.range || [first - pad, last + pad];

  // --- arrays ---

  function decode(packed) {
    const text = atob(packed.data), bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return new ARRAYS[packed.type](bytes.buffer);
  }

  /** Index of the first of the rising `xs` that is not below x. */
  function place(xs, x) {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  }

  function nearest(xs, x) {
    const after = place(xs, x);
    if (after === 0) return 0;
    if (after === xs.length) return after - 1;
    return x - xs[after - 1] <= xs[after] - x ? after - 1 : after;
  }

  function words(value) {
    if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
    return size !== 0 && (size < 1e-3 || size >= 1e7) ? value.toExponential(3)
      : value.toPrecision(5);
  }

  // --- panels ---

  const panels = report.panels.map((spec, number) => {
    const figure = document.getElementById(`panel-${number}`);
    const panel = {
      spec, figure, box: figure.querySelector(".plot"), value: figure.querySelector(".value"),
      button: figure.querySelector("button.log"), log: spec.log, stale: true, near: false,
      drawn: false, plot: document.createElement("div"), cursor: document.createElement("div"),
      margin: spec.kind === "heat" ? HEAT_MARGIN : MARGIN,
    };
    panel.cursor.className = "cursor";
    panel.box.append(panel.plot, panel.cursor);
    panel.button.addEventListener("click", () => setLog([panel], !panel.log));
    panel.box.addEventListener("pointermove", (event) => pointed(panel, event));
    panel.box.addEventListener("pointerdown", (event) => pointed(panel, event));
    panel.box.addEventListener("pointerleave", () => pointAt(null));
    return panel;
  });

  /** Arrays are unpacked when a panel is first drawn. */
  function unpack(panel) {
    const spec = panel.spec;
    if (panel.unpacked) return;
    panel.unpacked = true;
    if (spec.kind === "line") {
      panel.series = spec.series.map((s) => ({ ...s, x: decode(s.x), y: decode(s.y) }));
      const ys = panel.series.flatMap((s) => Array.from(s.y));
      panel.canLog = ys.some((y) => y > 0 && Number.isFinite(y));
    } else {
      panel.edges = decode(spec.x);
      panel.z = decode(spec.z);
      panel.strange = spec.bad === null ? null : decode(spec.bad);
      panel.canLog = panel.z.every((z) => !(z <= 0));
    }
    panel.log = panel.log && panel.canLog;
    panel.button.disabled = !panel.canLog;
  }

  function shown(series) {
    return series.role !== "abandoned" || state.abandoned;
  }

  /** The range of y: of what is shown, within the range of steps. */
  function valueRange(panel) {
    const [from, to] = whole();
    let low = Infinity, high = -Infinity;
    for (const series of panel.series.filter(shown)) {
      // Attempts that were abandoned are not in rising order.
      const sorted = series.role !== "abandoned";
      const start = sorted ? place(series.x, from) : 0;
      for (let i = start; i < series.x.length && !(sorted && series.x[i] > to); i++) {
        const y = series.y[i];
        if (series.x[i] < from || series.x[i] > to || !Number.isFinite(y)) continue;
        if (panel.log && y <= 0) continue;
        const at = panel.log ? Math.log10(y) : y;
        if (at < low) low = at;
        if (at > high) high = at;
      }
    }
    if (low > high) return panel.log ? [0, 1] : [0, 1];
    const least = Math.max(1e-9, 1e-3 * Math.abs(high));
    const space = Math.max(0.06 * (high - low), high === low ? least : 0);
    return [low - space, high + 1.6 * space];
  }

  function lines(panel) {
    const traces = [];
    const above = { yaxis: "y2", type: "scatter", hoverinfo: "skip" };
    for (const kind of report.marks) {
      if (state.hidden.has(kind.kind)) continue;
      const style = MARKS[kind.kind], x = [], y = [], long = { x: [], y: [] };
      for (const [from, to] of kind.marks) {
        if (style.symbol) { x.push(from, to, null); y.push(style.at, style.at, null); continue; }
        x.push(from, from, null);
        y.push(0, 1, null);
        if (to > from) { long.x.push(from, to, null); long.y.push(0.993, 0.993, null); }
      }
      const line = { color: style.color, width: style.width || 1.3, dash: style.dash };
      const marker = { symbol: style.symbol, size: 6, color: style.color };
      traces.push({ ...above, x, y, line, marker, mode: style.symbol ? "lines+markers" : "lines" });
      if (long.x.length) {
        traces.push({ ...above, ...long, mode: "lines", line: { color: style.color, width: 3 } });
      }
    }
    const order = { abandoned: 0, present: 1, middle: 2, held_out: 3 };
    const inOrder = panel.series.filter(shown).sort((a, b) => order[a.role] - order[b.role]);
    const low = { x: [], y: [] };
    // Where a middle is drawn, the values themselves are the band around it.
    const values = panel.series.some((s) => s.role === "middle") ? BAND : BLUE;
    for (const series of inOrder) {
      const color = { abandoned: GREY, present: values, middle: BLUE, held_out: ORANGE }[series.role];
      traces.push({
        type: "scatter", x: series.x, y: series.y, hoverinfo: "skip", connectgaps: false,
        mode: series.markers ? "lines+markers" : series.x.length === 1 ? "markers" : "lines",
        line: { color, width: color === BLUE ? 1.4 : 1 },
        opacity: series.role === "abandoned" ? 0.7 : 1,
        marker: { color, size: 6, symbol: series.markers ? "diamond" : "circle" },
      });
      if (panel.log && series.role === "present") {
        series.y.forEach((y, i) => { if (y <= 0) { low.x.push(series.x[i]); low.y.push(0.02); } });
      }
    }
    if (low.x.length) {
      const marker = { symbol: "triangle-down-open", size: 6, color: BLUE };
      traces.push({ ...above, ...low, mode: "markers", marker });
    }
    if (panel.spec.bad.length) {
      const x = [], y = [];
      for (const [from, to] of panel.spec.bad) { x.push(from, to, null); y.push(0.96, 0.96, null); }
      traces.push({ ...above, x, y, mode: "lines+markers", line: { color: BAD, width: 4 },
        marker: { symbol: "x", size: 7, color: BAD } });
    }
    return traces;
  }

  function cells(panel) {
    const num = panel.spec.layers, columns = panel.edges.length - 1;
    const layers = Array.from({ length: num }, (_, layer) => layer);
    const rows = (from) => layers.map((n) =>
      Float64Array.from({ length: columns }, (_, c) => from(c * num + n)));
    let low = Infinity, high = -Infinity;
    const z = rows((i) => {
      const value = panel.log ? Math.log10(panel.z[i]) : panel.z[i];
      if (value < low) low = value;
      if (value > high) high = value;
      return value;
    });
    if (low > high) { low = 0; high = 1; }
    const bar = { thickness: 9, outlinewidth: 0, xpad: 4, tickfont: { size: 11 }, nticks: 5 };
    if (panel.log) {
      const step = Math.max(1, Math.ceil((high - low) / 5));
      const tens = [];
      for (let t = Math.ceil(low); t <= high; t += step) tens.push(t);
      const ticks = tens.length > 1 ? tens : [low, (low + high) / 2, high];
      Object.assign(bar, { tickmode: "array", tickvals: ticks,
        ticktext: ticks.map((t) => tens.length > 1 ? `1e${t}` : (10 ** t).toPrecision(3)) });
    }
    const x = Array.from(panel.edges);
    const traces = [{ type: "heatmap", x, y: layers, z, zmin: low, zmax: high, zsmooth: false,
      colorscale: "Cividis", colorbar: bar, hoverinfo: "skip" }];
    if (panel.strange) traces.push(strangeCells(panel, x, layers, rows));
    return traces;
  }

  /** Cells that are not finite: marked, so that a narrow one is seen; filled if they are many. */
  function strangeCells(panel, edges, layers, rows) {
    const num = panel.spec.layers, x = [], y = [];
    panel.strange.forEach((is, i) => {
      if (!is) return;
      const column = Math.floor(i / num);
      x.push((edges[column] + edges[column + 1]) / 2);
      y.push(i % num);
    });
    if (x.length <= 2000) {
      return { type: "scatter", mode: "markers", x, y, hoverinfo: "skip",
        marker: { symbol: "x", size: 6, color: BAD, line: { width: 0.5, color: "#fff" } } };
    }
    return { type: "heatmap", x: edges, y: layers, z: rows((i) => panel.strange[i] ? 1 : NaN),
      zmin: 0, zmax: 1, showscale: false, hoverinfo: "skip", colorscale: [[0, BAD], [1, BAD]] };
  }

  function draw(panel) {
    unpack(panel);
    const heat = panel.spec.kind === "heat";
    panel.button.setAttribute("aria-pressed", String(panel.log));
    const font = { family: "system-ui, sans-serif", size: 12, color: "#3a424b" };
    const layout = {
      width: panel.box.clientWidth, height: panel.box.clientHeight, margin: panel.margin, font,
      paper_bgcolor: "#fff", plot_bgcolor: heat ? "#eceff2" : "#fff", showlegend: false,
      hovermode: false, dragmode: "zoom",
      xaxis: { range: whole(), zeroline: false, showgrid: false, ticks: "outside", ticklen: 4,
        tickcolor: "#b9c0c8", linecolor: "#b9c0c8", showline: true, nticks: 8, separatethousands: true,
        exponentformat: "none" },
      yaxis: { fixedrange: true, zeroline: false, gridcolor: "#edf0f3", nticks: 6,
        exponentformat: "power", automargin: false },
    };
    if (heat) {
      Object.assign(layout.yaxis, { range: [-0.5, panel.spec.layers - 0.5], showgrid: false,
        title: { text: "layer", standoff: 4, font: { size: 11 } },
        ...(panel.spec.layers <= 6 ? { dtick: 1 } : {}) });
    } else {
      Object.assign(layout.yaxis, { type: panel.log ? "log" : "linear", range: valueRange(panel) });
      const top = panel.log ? 10 ** layout.yaxis.range[1] : layout.yaxis.range[1];
      layout.yaxis.exponentformat = top >= 1e4 ? "B" : "power";
      if (panel.log && layout.yaxis.range[1] - layout.yaxis.range[0] > 2) layout.yaxis.dtick =
        Math.ceil((layout.yaxis.range[1] - layout.yaxis.range[0]) / 5);
      layout.yaxis2 = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
    }
    Plotly.react(panel.plot, heat ? cells(panel) : lines(panel), layout, {
      staticPlot: coarse, displaylogo: false, doubleClick: false, scrollZoom: false,
      displayModeBar: "hover", modeBarButtons: [["toImage"]], showTips: false,
      toImageButtonOptions: { filename: `${report.name} ${panel.spec.title}`, scale: 2 },
    });
    if (!panel.drawn) {
      panel.drawn = true;
      if (!coarse) {
        panel.plot.on("plotly_relayout", (change) => {
          const from = change["xaxis.range[0]"], to = change["xaxis.range[1]"];
          if (from !== undefined && to !== undefined) setRange([from, to]);
        });
        panel.plot.on("plotly_doubleclick", () => setRange(null));
      }
    }
    panel.stale = false;
  }

  // What is on the screen first, then the others: the page answers while they are drawn.
  let waiting = null;
  function work() {
    if (waiting !== null) return;
    const next = panels.find((p) => p.stale && p.near) || panels.find((p) => p.stale);
    document.documentElement.dataset.drawn = String(panels.filter((p) => p.drawn).length);
    if (next === undefined) { document.documentElement.dataset.ready = "yes"; return; }
    waiting = setTimeout(() => { waiting = null; draw(next); work(); }, next.near ? 0 : 15);
  }

  function redraw(some = panels) {
    for (const panel of some) panel.stale = true;
    work();
  }

  // --- what a person changes ---

  const inputs = ["from", "to"].map((id) => document.getElementById(id));
  function setRange(range) {
    const valid = range !== null && range[1] > range[0];
    state.range = valid ? range : null;
    inputs.forEach((input, i) => {
      input.value = state.range === null ? [first, last][i] : Math.round(state.range[i]);
    });
    pointAt(null);
    redraw();
  }

  function setLog(some, log) {
    for (const panel of some) { unpack(panel); panel.log = log && panel.canLog; }
    redraw(some);
  }

  inputs.forEach((input) => input.addEventListener("change", () =>
    setRange(inputs.map((other) => Number(other.value)))));
  document.getElementById("all-steps").addEventListener("click", () => setRange(null));
  document.getElementById("all-log").addEventListener("click", () => setLog(panels, true));
  document.getElementById("all-linear").addEventListener("click", () => setLog(panels, false));
  const abandoned = document.getElementById("abandoned");
  if (abandoned !== null) {
    abandoned.addEventListener("change", () => { state.abandoned = abandoned.checked; redraw(); });
  }
  for (const box of document.querySelectorAll("input[data-kind]")) {
    const style = MARKS[box.dataset.kind], swatch = box.parentElement.querySelector(".swatch");
    swatch.style.borderTopColor = style.color;
    swatch.style.borderTopStyle = { solid: "solid", dot: "dotted" }[style.dash || "solid"] || "dashed";
    box.addEventListener("change", () => {
      if (box.checked) state.hidden.delete(box.dataset.kind);
      else state.hidden.add(box.dataset.kind);
      redraw(panels.filter((p) => p.spec.kind === "line"));
    });
  }

  // --- the cursor ---

  const here = document.getElementById("here");
  if (coarse) here.textContent = "Tap a figure to read every one at that step.";
  const atRest = here.textContent;

  function pointed(panel, event) {
    const box = panel.box.getBoundingClientRect();
    const width = box.width - panel.margin.l - panel.margin.r;
    const share = (event.clientX - box.left - panel.margin.l) / width;
    if (share < 0 || share > 1) { pointAt(null); return; }
    const [from, to] = whole();
    let layer = null;
    if (panel.spec.kind === "heat") {
      const height = box.height - panel.margin.t - panel.margin.b;
      const up = 1 - (event.clientY - box.top - panel.margin.t) / height;
      layer = Math.min(panel.spec.layers - 1, Math.max(0, Math.floor(up * panel.spec.layers)));
    }
    pointAt(Math.min(last, Math.max(first, Math.round(from + share * (to - from)))), layer);
  }

  function pointAt(step, layer = null) {
    const [from, to] = whole();
    for (const panel of panels) {
      const visible = step !== null && panel.drawn && panel.near && step >= from && step <= to;
      panel.cursor.style.display = visible ? "block" : "none";
      panel.value.textContent = visible ? read(panel, step, layer) : "";
      if (visible) {
        const width = panel.box.clientWidth - panel.margin.l - panel.margin.r;
        panel.cursor.style.left = `${panel.margin.l + width * (step - from) / (to - from)}px`;
      }
    }
    here.textContent = step === null ? atRest : [`step ${step.toLocaleString("en-US")}`,
      ...near(step, 0.006 * (to - from))].join("  \u00b7  ");
  }

  function read(panel, step, layer) {
    if (panel.spec.kind === "heat") {
      const column = Math.min(panel.edges.length - 2, Math.max(0, place(panel.edges, step + 1) - 1));
      if (layer === null || layer >= panel.spec.layers) return "";
      const at = column * panel.spec.layers + layer;
      const strange = panel.strange && panel.strange[at] ? " and not finite" : "";
      return `layer ${layer}: ${words(panel.z[at])}${strange}`;
    }
    for (const [from, to, count, what] of panel.spec.bad) {
      if (step >= from && step <= to && count === to - from + 1) return `${step}: ${what}`;
    }
    return panel.series.filter((s) => s.role === "present" || s.role === "held_out").map((series) => {
      const at = nearest(series.x, step);
      const name = series.role === "held_out" ? "held out, " : "";
      return `${name}${series.x[at]}: ${words(series.y[at])}`;
    }).join("  \u00b7  ");
  }

  function near(step, distance) {
    const found = [];
    for (const kind of report.marks) {
      if (state.hidden.has(kind.kind)) continue;
      for (const [from, to, label] of kind.marks) {
        if (step >= from - distance && step <= to + distance) found.push(label);
      }
    }
    return found.slice(0, 4);
  }

  // --- the window ---

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      panels.find((p) => p.figure === entry.target).near = entry.isIntersecting;
    }
    work();
  }, { rootMargin: "300px" });
  panels.forEach((panel) => observer.observe(panel.figure));
  let width = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    redraw();
  });
  window.addEventListener("beforeprint", () => {
    document.body.classList.add("printing");
    panels.forEach(draw);
  });
  window.addEventListener("afterprint", () => {
    document.body.classList.remove("printing");
    redraw();
  });
  setRange(null);
})();
