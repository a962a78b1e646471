"use strict";
// Draws the charts of the page from its JSON (curve_charts.py, link_charts.py) with Observable Plot.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const hidden = {}; // keys switched off in the legend, by scope
  const units = [[600, 1, "s"], [3 * 3600, 60, "min"], [Infinity, 3600, "h"]];
  const bytes = [[1e3, 1, "B"], [1e6, 1e3, "kB"], [1e9, 1e6, "MB"], [Infinity, 1e9, "GB"]];

  const colour = (place) => (place < 0 ? "var(--ink)" : `var(--c${place % 8})`);
  const unit = (scales, most) => scales.find(([limit]) => most <= limit);
  const number = (value) => {
    if (!Number.isFinite(value)) return "—";
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  };
  const reading = (value, kind) => (kind === "percent" ? `${number(+value.toFixed(1))} %` : number(+value.toFixed(2)));
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const tip = (rows, options) =>
    Plot.tip(rows, Plot.pointer({ fill: "var(--paper)", stroke: "var(--line)", maxRadius: 60, className: "tip", ...options }));
  const axis = (name, scales, end) => {
    const [, scale, word] = unit(scales, end);
    return { scale, word, name: `${name}, ${word}` };
  };

  function lines(spec, width, off) {
    const x = spec.x === "time" ? axis("time", units, spec.end) : axis("sent", bytes, spec.end);
    const phone = width < 560;
    const shown = spec.series.filter((one) => !off.has(one.k));
    const ends = spec.tall && !phone ? shown.filter((one) => one.m) : [];
    const end = spec.end / x.scale;
    const height = spec.tall ? (phone ? 270 : 360) : 240;
    const rows = (one) => one.x.map((at, i) => ({ x: at / x.scale, y: one.y[i], one }));
    const marks = [Plot.ruleY([0], { stroke: "var(--faint)" })];
    if (spec.rule !== null) {
      marks.push(Plot.ruleY([spec.rule], { stroke: "var(--faint)", strokeDasharray: "5 4" }));
      marks.push(Plot.text([`target ${reading(spec.rule, spec.y)}`], { x: 0, y: spec.rule, dx: 4, dy: -7, textAnchor: "start", fill: "var(--faint)" }));
    }
    for (const one of shown) {
      const points = rows(one);
      const stroke = colour(one.c);
      marks.push(Plot.line(points, { x: "x", y: "y", stroke, strokeWidth: one.w, strokeOpacity: one.o, curve: spec.step ? "step-after" : "linear", clip: true }));
      if (!one.m) continue;
      const last = points[points.length - 1];
      if (one.m === "ended") {
        marks.push(Plot.line([last, { x: end, y: last.y }], { x: "x", y: "y", stroke, strokeWidth: 1.6, strokeDasharray: "2 5" }));
        marks.push(Plot.text([last], { x: "x", y: "y", text: () => "ended", dy: -11, fill: stroke }));
      }
      marks.push(Plot.dot([last], { x: "x", y: "y", fill: stroke, r: 4 }));
    }
    marks.push(...endLabels(ends, end, height - 60, spec));
    marks.push(tip(shown.flatMap(rows), {
      x: "x", y: "y", stroke: (d) => colour(d.one.c),
      title: (d) => `${cut(d.one.n, 60)}\n${number(d.y)}${spec.y === "percent" ? " %" : ""} at ${number(d.x)} ${x.word}`,
    }));
    return Plot.plot({
      width, height, marks, marginLeft: 48, marginBottom: 38, marginTop: 22,
      marginRight: ends.length ? Math.min(250, 28 + 7 * Math.max(...ends.map((one) => cut(one.n, 26).length + 5))) : 14,
      x: { domain: [0, end], label: x.name, ticks: Math.max(3, Math.round(width / 95)), labelArrow: "none" },
      y: { domain: [spec.bottom, spec.top], label: spec.label, grid: true, ticks: 5, labelArrow: "none" },
      color: { type: "identity" },
    });
  }

  // A grid of cells, each with the name of its panel and what `draw` makes of it.
  function grid(panels, columns, off, width, draw) {
    const all = document.createElement("div");
    all.className = "panels";
    all.style.setProperty("--columns", columns);
    for (const panel of panels) {
      const cell = document.createElement("div");
      const name = document.createElement("h4");
      name.textContent = cut(panel.n, 60);
      cell.className = off.has(panel.k) ? "off" : "";
      cell.append(name, draw(panel, (width + 16) / columns - 16));
      all.append(cell);
    }
    return all;
  }

  function metrics(spec, width, off) {
    const columns = Math.max(1, Math.min(spec.panels.length, Math.floor((width + 16) / 316)));
    return grid(spec.panels, columns, off, width, (panel, cell) => lines(panel.spec, cell, off));
  }

  // Names at the ends of lines, pushed apart so that none covers another.
  function endLabels(series, end, height, spec) {
    const labels = series.map((one) => ({ one, y: one.y[one.y.length - 1] })).sort((a, b) => b.y - a.y);
    let above = -Infinity;
    return labels.map((label) => {
      const at = (height * (spec.top - label.y)) / (spec.top - spec.bottom);
      const placed = Math.max(at, above + 15);
      above = placed;
      return Plot.text([label], { x: () => end, y: "y", dx: 10, dy: placed - at, textAnchor: "start", fontWeight: 600,
        text: (d) => `${cut(d.one.n, 26)} ${reading(d.y, spec.y)}`, fill: colour(label.one.c) });
    });
  }

  function panels(spec, width, off) {
    const x = axis("time", units, spec.end);
    const y = axis("", bytes, spec.top);
    const columns = Math.max(1, Math.floor((width + 16) / 241));
    return grid(spec.panels, columns, off, width, (panel, cell) => {
      const rows = spec.x.map((at, i) => ({
        x: at / x.scale, sent: (panel.sent[i] ?? 0) / y.scale,
        budget: panel.budget[i] === null ? NaN : panel.budget[i] / y.scale,
        bandwidth: panel.bandwidth[i] === null ? NaN : panel.bandwidth[i] / y.scale,
      }));
      const stroke = colour(panel.c);
      return Plot.plot({
        width: cell, height: 150, marginLeft: 44, marginRight: 8, marginBottom: 34,
        x: { domain: [0, spec.end / x.scale], label: x.name, ticks: 4, labelArrow: "none" },
        y: { domain: [0, spec.top / y.scale], label: `${y.word}/s`, grid: true, ticks: 3, labelArrow: "none" },
        marks: [
          Plot.ruleY([0], { stroke: "var(--faint)" }),
          Plot.areaY(rows, { x: "x", y: "sent", fill: stroke, fillOpacity: 0.4, curve: "step", clip: true }),
          Plot.lineY(rows, { x: "x", y: "budget", stroke, strokeWidth: 1.5, curve: "step", clip: true }),
          Plot.lineY(rows, { x: "x", y: "bandwidth", stroke: "var(--ink)", strokeWidth: 1.2, strokeDasharray: "1 3", curve: "step", clip: true }),
          Plot.tip(rows, Plot.pointerX({
            x: "x", y: "sent", fill: "var(--paper)", stroke: "var(--line)", className: "tip",
            title: (d) => `at ${number(d.x)} ${x.word}\nsent ${number(d.sent)} ${y.word}/s\nbudget ${number(d.budget)}\nbandwidth ${number(d.bandwidth)}`,
          })),
        ],
      });
    });
  }

  // A stacked bar for each row; the pointer gets all parts of one.
  function parts(spec, width) {
    const letters = width < 400 ? 16 : 22;
    const margin = 26 + 6.5 * Math.min(letters, Math.max(...spec.rows.map((row) => row.n.length)));
    const place = (part) => (spec.parts.length === 3 ? [0, 1, 7][part] : part);
    const bars = spec.rows.flatMap((row) => {
      const total = row.v.reduce((sum, value) => sum + value, 0);
      let before = 0;
      return row.v.map((value, part) => {
        const share = (100 * value) / total;
        before += share;
        return { row: row.n, part: place(part), share, from: before - share, to: before };
      });
    });
    const readable = bars.filter((bar) => bar.share * (width - margin) > 3400);
    const tipText = (row) => {
      const own = bars.filter((bar) => bar.row === row.n);
      return [cut(row.n, 60), ...own.map((bar, part) => `${spec.parts[part]} ${number(+bar.share.toFixed(1))} %, ${number(row.v[part])} s`)].join("\n");
    };
    const key = document.createElement("p");
    key.className = "share-key";
    spec.parts.forEach((name, part) => {
      const one = document.createElement("span");
      const patch = document.createElement("i");
      patch.className = `phase${place(part)}`;
      one.append(patch, name);
      key.append(one);
    });
    const all = document.createElement("div");
    all.append(key, Plot.plot({
      width, height: 44 + 28 * spec.rows.length, marginLeft: margin, marginRight: 14, marginBottom: 34, marginTop: 4,
      x: { domain: [0, 100], label: "share of the time, %", labelArrow: "none", ticks: 5 },
      y: { domain: spec.rows.map((row) => row.n), label: null, padding: 0.22, tickSize: 0, tickPadding: 18, tickFormat: (name) => cut(name, letters) },
      color: { type: "identity" },
      marks: [
        Plot.barX(bars, { y: "row", x1: "from", x2: "to", fill: (d) => `var(--phase${d.part})`, stroke: "var(--paper)", strokeWidth: 0.7 }),
        Plot.text(readable, { y: "row", x: (d) => (d.from + d.to) / 2, text: (d) => `${Math.round(d.share)} %`, fill: (d) => `var(--on-phase${d.part})` }),
        Plot.dot(spec.rows, { y: "n", x: 0, dx: -10, r: 4, fill: (d) => colour(d.c) }),
        Plot.tip(spec.rows, Plot.pointerY({ y: "n", x: 50, fill: "var(--paper)", stroke: "var(--line)", maxRadius: 60, className: "tip", title: tipText })),
      ],
    }));
    return all;
  }

  function timeline(spec, width) {
    const x = axis("time", units, spec.end);
    const letters = width < 560 ? 13 : 28;
    const margin = 16 + 6.5 * Math.min(letters, Math.max(...spec.rows.map((name) => name.length)));
    const bars = spec.bars.map(([row, place, from, to]) => ({ row, place, from: from / x.scale, to: to / x.scale }));
    const dots = spec.dots.map(([row, warning, at, text]) => ({ row, warning, at: at / x.scale, text }));
    const marked = (warning) => dots.filter((dot) => dot.warning === warning);
    return Plot.plot({
      width, height: 52 + 25 * spec.rows.length, marginLeft: margin, marginRight: 14, marginBottom: 36,
      x: { domain: [spec.begin / x.scale, spec.end / x.scale], label: x.name, grid: true, labelArrow: "none", ticks: Math.max(3, Math.round(width / 110)) },
      y: { domain: spec.rows, label: null, padding: 0.35, tickSize: 0, tickFormat: (name) => cut(name, letters) },
      color: { type: "identity" },
      marks: [
        Plot.barX(bars, { y: "row", x1: "from", x2: "to", fill: (d) => colour(d.place), fillOpacity: 0.35, rx: 3 }),
        Plot.dot(marked(0), { x: "at", y: "row", r: 3.2, fill: "var(--faint)", stroke: "var(--paper)" }),
        Plot.dot(marked(1), { x: "at", y: "row", r: 5.5, symbol: "diamond", fill: "var(--bad)", stroke: "var(--paper)" }),
        tip(dots, { x: "at", y: "row", title: (d) => `${d.text}\nat ${number(d.at)} ${x.word}`, lineWidth: 26, textOverflow: "ellipsis" }),
      ],
    });
  }

  const kinds = { lines, panels, metrics, parts, timeline };

  function draw(place) {
    const width = place.clientWidth;
    const spec = data[place.dataset.chart];
    if (!width || !spec || place.closest("details:not([open])")) return; // drawn when it is opened
    place.dataset.width = width;
    place.replaceChildren(kinds[spec.kind](spec, width, hidden[place.dataset.scope] ?? new Set()));
  }

  const places = [...document.querySelectorAll(".plot")];
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) if (String(target.clientWidth) !== target.dataset.width) draw(target);
  });
  for (const place of places) {
    draw(place);
    observer.observe(place);
  }
  for (const part of document.querySelectorAll("details")) {
    part.addEventListener("toggle", () => part.querySelectorAll(".plot:empty").forEach(draw));
  }
  for (const button of document.querySelectorAll(".keys button")) {
    button.addEventListener("click", () => {
      const off = (hidden[button.dataset.scope] ??= new Set());
      const { key } = button.dataset;
      off.has(key) ? off.delete(key) : off.add(key);
      button.setAttribute("aria-pressed", String(!off.has(key)));
      places.filter((place) => place.dataset.scope === button.dataset.scope).forEach(draw);
    });
  }
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details.run")) part.open = true;
    places.forEach(draw);
  });
})();
