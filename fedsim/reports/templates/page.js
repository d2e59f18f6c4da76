"use strict";
// Draws the charts of a page from the JSON beside each (lines and bars by uPlot), and sorts tables.
(() => {
  const LETTER = 6.7; // width of a letter in a chart, in pixels
  const SERIES = 8;
  const DASHES = JSON.parse(document.getElementById("dashes").textContent);
  const REFERENCE_DASHES = ["3 3", "9 4", "1 4"]; // lines that were not measured

  // Paths around the origin, in the order of plots.MARKERS.
  const MARKERS = [
    "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z", "M-3.5 -3.5H3.5V3.5H-3.5Z", "M0 -4.5L4.3 3.4H-4.3Z",
    "M0 -4.8L4.8 0L0 4.8L-4.8 0Z", "M0 4.5L4.3 -3.4H-4.3Z",
    "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "M-4.5 -2.5L-2.5 -4.5L0 -2L2.5 -4.5L4.5 -2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0Z",
    "M0 -5L1.3 -1.7L4.8 -1.5L2.1 .7L3 4.1L0 2.2L-3 4.1L-2.1 .7L-4.8 -1.5L-1.3 -1.7Z",
  ];

  function element(name, parent, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function shape(name, parent, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.append(made);
    return made;
  }

  // A canvas knows no custom properties: their values are read each time it is drawn.
  const property = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourName = (line) => (line.reference ? "--muted" : `--series-${line.index % SERIES}`);
  const dashOf = (line) => (line.reference ? REFERENCE_DASHES[line.index % 3] : DASHES[line.index % SERIES]);

  // A number is a share of a hundred, bytes, or in no unit.
  const SHARE = "share", BYTES = "bytes";
  const unitOf = (spec) => (spec.percent ? SHARE : spec.bytes ? BYTES : "");

  function bytes(value, digits) {
    const units = ["bytes", "kB", "MB", "GB", "TB"];
    let count = value, power = 0;
    for (; Math.abs(count) >= 999.5 && power < units.length - 1; power++) count /= 1000;
    return `${Number(count.toPrecision(digits))} ${units[power]}`;
  }

  function number(value, unit) {
    if (value === null || value === undefined) return "–";
    if (unit === SHARE) return `${(100 * value).toFixed(2)} %`;
    if (unit === BYTES) return bytes(value, 3);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e15 || size < 1e-4) return value.toExponential(2);
    if (Number.isInteger(value) || size >= 1e4) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  }

  // As few digits as tell neighbouring ticks apart; `step` is the distance between them.
  function tickText(value, step, unit) {
    if (unit === BYTES) return bytes(value, 6);
    const sign = unit === SHARE ? " %" : "", shown = unit === SHARE ? 100 * value : value;
    const size = Math.abs(shown);
    if (size >= 1e15 || (size > 0 && size < 1e-4)) return shown.toExponential(1) + sign;
    if (size >= 1e6) return shown.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 6 }) + sign;
    const between = unit === SHARE ? 100 * step : step;
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(between) + 1e-9)));
    return shown.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + sign;
  }

  // Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone on a long one.
  function logTicks(low, high) {
    const ticks = [], digits = high / low > 1e3 ? [1] : high / low > 3 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 3, 4, 5, 6, 8];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      ticks.push(...digits.map((digit) => digit * 10 ** power));
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }

  function swatch(line) {
    const made = shape("svg", null, { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    const colour = `var(${colourName(line)})`;
    shape("line", made, { x1: 1, x2: 25, y1: 6, y2: 6, "stroke-width": 2, stroke: colour, "stroke-dasharray": dashOf(line) });
    if (!line.reference) shape("path", made, { d: MARKERS[line.index % SERIES], fill: colour, transform: "translate(13 6)" });
    return made;
  }

  // The box beside the pointer, and the same words for screen readers.
  class Tip {
    constructor(plot) {
      this.plot = plot;
      this.box = element("div", plot.parentElement, "tip");
      this.box.hidden = true;
      this.announcer = element("div", plot.parentElement, "unseen");
      this.announcer.setAttribute("aria-live", "polite");
      plot.addEventListener("pointerleave", () => this.hide());
      plot.addEventListener("blur", () => this.hide());
    }

    hide() {
      this.box.hidden = true;
    }

    show(left, facts, spoken) {
      this.box.replaceChildren();
      for (const [index, fact] of facts.entries()) {
        const row = element("div", this.box, index ? "" : "head");
        if (fact.line) row.append(swatch(fact.line));
        element("span", row, "", fact.name);
        element("b", row, "", fact.value);
      }
      this.box.hidden = false;
      const room = this.plot.clientWidth, wide = this.box.offsetWidth;
      const place = left + 14 + wide > room ? left - wide - 14 : left + 14;
      this.box.style.left = `${this.plot.offsetLeft + Math.min(Math.max(place, 0), Math.max(room - wide, 0))}px`;
      this.box.style.top = `${this.plot.offsetTop + 24}px`;
      if (spoken) this.announcer.textContent = facts.map((fact) => `${fact.name} ${fact.value}`).join(", ");
    }
  }

  // Lines with bands, or bars: both are columns over x, which is an index for bars.
  class Chart {
    constructor(plot, spec) {
      this.plot = plot;
      this.spec = spec;
      this.bars = spec.kind === "bars";
      this.unit = unitOf(spec);
      this.tip = new Tip(plot);
      this.log = false;
      const lines = this.bars ? [{ name: spec.y, x: spec.values.map((_, i) => i), y: spec.values }] : spec.series.map((line) => ({ ...line, x: line.x ?? spec.xs }));
      this.lines = lines.map((line, index) => ({ ...line, index, shown: true }));
      // A line's columns are y and the two ends of its band. Where only other lines have a point,
      // a column is undefined, and the line goes on; where its own value is missing, it is broken.
      const columns = (line) => [line.y, line.low ?? line.y.map(() => null), line.high ?? line.y.map(() => null)];
      const tables = this.lines.map((line) => [line.x, ...columns(line)]);
      this.data = this.lines.length ? uPlot.join(tables) : [[]];
      this.first = this.data[0][0] ?? 0;
      this.last = this.data[0].at(-1) ?? 1;
      this.from = this.first;
      this.to = this.last;
      this.tools();
      const name = element("div", null, "axis-name", spec.y);
      plot.before(name);
      this.draw();
      plot.addEventListener("keydown", (event) => this.press(event));
      new ResizeObserver(() => this.u.setSize(this.size())).observe(plot);
      for (const media of ["print", "(prefers-color-scheme: dark)"]) {
        matchMedia(media).addEventListener("change", () => this.u.redraw());
      }
    }

    size() {
      const wide = Math.max(this.plot.clientWidth, 120);
      const tall = this.spec.square ? Math.min(wide, 340) : Math.max(210, Math.min(0.52 * wide, 300));
      return { width: wide, height: Math.round(tall) };
    }

    tools() {
      const bar = element("div", null, "tools");
      const legend = element("div", bar, "legend");
      for (const line of this.lines.length > 1 ? this.lines : []) {
        const key = element("button", legend, "key");
        key.type = "button";
        key.title = "Show or hide";
        key.setAttribute("aria-pressed", "true");
        key.append(swatch(line));
        element("span", key, "", line.name);
        key.addEventListener("click", () => {
          line.shown = !line.shown;
          key.setAttribute("aria-pressed", String(line.shown));
          for (const column of [1, 2, 3]) this.u.setSeries(3 * line.index + column, { show: line.shown });
        });
      }
      const buttons = element("div", bar, "buttons");
      const button = (text, title, act) => {
        const made = element("button", buttons, "", text);
        made.type = "button";
        made.title = title;
        made.setAttribute("aria-label", title);
        made.addEventListener("click", act);
        return made;
      };
      if (!this.bars && this.data[0].length > 2) {
        button("+", "Zoom in", () => this.zoom(0.5));
        button("−", "Zoom out", () => this.zoom(2));
        this.reset = button("Reset", "Reset the zoom", () => this.zoomTo(this.first, this.last));
        this.reset.disabled = true;
      }
      const values = this.lines.flatMap((line) => [...line.y, ...(line.low ?? [])]).filter((y) => y !== null);
      const { percent, square, counts } = this.spec;
      if (!this.bars && !percent && !square && !counts && values.length > 2 && Math.min(...values) > 0) {
        const toggle = button("Log", "Logarithmic scale", () => {
          this.log = !this.log;
          toggle.setAttribute("aria-pressed", String(this.log));
          this.u.destroy();
          this.draw();
        });
        toggle.setAttribute("aria-pressed", "false");
      }
      if (bar.textContent) this.plot.before(bar);
    }

    draw() {
      const { spec, unit } = this;
      const whole = this.data[0].every(Number.isInteger);
      const axis = {
        stroke: () => property("--muted"), font: `12px ${getComputedStyle(document.body).fontFamily}`,
        grid: { stroke: () => property("--grid"), width: 1 }, ticks: { stroke: () => property("--frame"), width: 1, size: 4 },
      };
      const xUnit = spec.square ? SHARE : "";
      const options = {
        ...this.size(),
        legend: { show: false },
        padding: [8, 24, 0, 0],
        scales: {
          x: { time: false, range: () => this.domain() },
          y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) },
        },
        axes: [
          {
            ...axis, label: spec.x, labelSize: 20, labelFont: axis.font, labelGap: 2, size: 28, gap: 4, space: 80,
            grid: { show: false }, border: { show: true, stroke: () => property("--frame"), width: 1 },
            ...(whole ? { incrs: [1, 2, 5].flatMap((digit) => Array.from({ length: 12 }, (_, power) => digit * 10 ** power)).sort((a, b) => a - b) } : {}),
            values: (_, splits, __, ___, step) => splits.map((tick) => tickText(tick, step, xUnit)),
            ...(this.bars ? this.names() : {}),
          },
          {
            ...axis, gap: 6, space: 40,
            size: (_, texts) => Math.max(...(texts ?? []).map((text) => text?.length ?? 0), 2) * LETTER + 16,
            values: (_, splits, __, ___, step) => splits.map((tick) => (this.log ? number(tick, unit) : tickText(tick, step, unit))),
            ...(this.log ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits } : {}),
          },
        ],
        series: [{}, ...this.lines.flatMap((line) => this.columns(line))],
        bands: this.lines.filter((line) => line.low).map((line) => ({
          series: [3 * line.index + 3, 3 * line.index + 2], fill: () => `${property(colourName(line))}33`,
        })),
        cursor: {
          y: false, drag: { x: !this.bars, y: false, setScale: false }, bind: { dblclick: () => () => this.reset && this.zoomTo(this.first, this.last) },
          hover: { prox: this.bars ? null : 40 },
          points: { size: 10, width: 2, fill: () => "transparent", show: !this.bars },
        },
        hooks: {
          setCursor: [() => this.point()],
          setSelect: [() => this.zoomToSelection()],
          drawSeries: [(_, column) => this.markers(column)],
        },
      };
      this.u = new uPlot(options, this.data, this.plot);
      this.plot.uplot = this.u;
    }

    columns(line) {
      const stroke = () => property(colourName(line));
      const common = { spanGaps: false, show: line.shown, points: { show: false } };
      const end = { ...common, stroke: null, width: 0 };
      if (this.bars) return [{ ...common, stroke, fill: stroke, paths: uPlot.paths.bars({ size: [0.84, 72] }) }, end, end];
      const dash = dashOf(line).split(" ").filter(Boolean).map((length) => length * uPlot.pxRatio);
      return [{ ...common, stroke, width: line.reference ? 1.5 : 2, dash: dash.length ? dash : undefined }, end, end];
    }

    // As many labels of bars as there is room for.
    names() {
      const labels = this.spec.labels, longest = Math.max(...labels.map((label) => label.length), 1) * LETTER + 10;
      return {
        splits: (u) => {
          const every = Math.max(1, Math.ceil((longest * labels.length) / Math.max(u.width - 60, 1)));
          return labels.map((_, i) => i).filter((i) => i % every === 0);
        },
        values: (_, splits) => splits.map((i) => labels[i]),
      };
    }

    domain() {
      if (this.bars) return [-0.5, this.spec.values.length - 0.5];
      return this.from === this.to ? [this.from - 1, this.to + 1] : [this.from, this.to];
    }

    range(low, high) {
      const { percent, square, counts, from_zero } = this.spec;
      if (square) return [0, 1];
      if (low === null || low === undefined || low > high) return this.log ? [1, 10] : [0, 1];
      if (this.log) return [low / 1.05, high * 1.05];
      if (counts || this.bars || (from_zero && low > 0 && !this.isZoomed)) low = 0;
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      const bottom = low >= 0 && low - room < 0 ? 0 : low - room;
      return [bottom, percent && high <= 1 ? Math.min(high + room, 1) : high + room];
    }

    // Some points of a line carry its marker: all of a short one, eight of a long one, each line's
    // at other places.
    markers(column) {
      const line = this.lines[Math.floor((column - 1) / 3)];
      if ((column - 1) % 3 || this.bars || line.reference || !line.shown) return;
      const { u } = this, { ctx } = u;
      const real = line.x.map((x, i) => [x, line.y[i]]).filter(([x, y]) => y !== null && x >= this.from && x <= this.to && !(this.log && y <= 0));
      const every = real.length <= 12 ? 1 : Math.ceil(real.length / 8);
      const marker = new Path2D(MARKERS[line.index % SERIES]);
      real.forEach(([x, y], i) => {
        if (real.length > 12 && (i - Math.floor((line.index * every) / SERIES)) % every) return;
        ctx.save();
        ctx.translate(u.valToPos(x, "x", true), u.valToPos(y, "y", true));
        ctx.scale(uPlot.pxRatio, uPlot.pxRatio);
        ctx.fillStyle = property(colourName(line));
        ctx.fill(marker);
        ctx.restore();
      });
    }

    get isZoomed() {
      return this.from > this.first || this.to < this.last;
    }

    zoomTo(from, to) {
      this.from = Math.max(from, this.first);
      this.to = Math.min(to, this.last);
      if (this.from >= this.to) [this.from, this.to] = [this.first, this.last];
      this.u.setScale("x", { min: this.from, max: this.to });
      this.reset.disabled = !this.isZoomed;
    }

    zoomToSelection() {
      const { left, width } = this.u.select;
      if (width > 6 && this.reset) this.zoomTo(this.u.posToVal(left, "x"), this.u.posToVal(left + width, "x"));
      this.u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    }

    zoom(factor) {
      const at = this.data[0][this.u.cursor.idx] ?? (this.from + this.to) / 2;
      this.zoomTo(at - (at - this.from) * factor, at + (this.to - at) * factor);
    }

    press(event) {
      const many = event.shiftKey ? 10 : 1;
      const whole = () => this.zoomTo(this.first, this.last);
      const zooms = this.reset ? { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: whole, Escape: () => { this.tip.hide(); whole(); } } : {};
      const acts = {
        ArrowLeft: () => this.step(-many), ArrowRight: () => this.step(many),
        Home: () => this.step(-Infinity), End: () => this.step(Infinity),
        ...zooms,
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    }

    step(by) {
      const x = this.data[0];
      const inside = x.map((_, i) => i).filter((i) => x[i] >= this.from && x[i] <= this.to);
      if (!inside.length) return;
      const now = inside.indexOf(this.u.cursor.idx);
      const from = now >= 0 ? now : by > 0 ? -1 : inside.length;
      const index = inside[Math.max(0, Math.min(inside.length - 1, from + by))];
      this.speaks = true;
      this.u.setCursor({ left: this.u.valToPos(x[index], "x"), top: 0 });
      this.speaks = false;
    }

    point() {
      const { u, spec, unit } = this, { idx, idxs, left } = u.cursor;
      if (idx === null || idx === undefined || left < 0) return this.tip.hide();
      const x = this.data[0][idx];
      const facts = [{ name: spec.x, value: this.bars ? spec.labels[x] : number(x, spec.square ? SHARE : "") }];
      for (const line of this.lines) {
        const column = 3 * line.index + 1, at = idxs[column];
        const y = at === null || at === undefined ? null : this.data[column][at];
        if (!line.shown || y === null || y === undefined) continue;
        const low = this.data[column + 1][at], high = this.data[column + 2][at];
        const band = typeof low === "number" ? ` (${number(low, unit)} to ${number(high, unit)})` : "";
        facts.push({ line: this.bars ? undefined : line, name: line.name, value: number(y, unit) + band });
      }
      this.tip.show(u.over.offsetLeft + left, facts, this.speaks);
    }
  }

  // What is drawn as SVG, anew for each width.
  class Drawing {
    constructor(plot, spec) {
      this.plot = plot;
      this.spec = spec;
      this.tip = new Tip(plot);
      new ResizeObserver(() => { if (plot.clientWidth !== this.width) this.draw(); }).observe(plot);
      this.draw();
    }

    begin(wide, height) {
      this.plot.querySelector("svg")?.remove();
      this.svg = shape("svg", this.plot, { viewBox: `0 0 ${wide} ${height}`, width: wide, height, "aria-hidden": "true" });
    }

    text(x, y, content, attributes) {
      shape("text", this.svg, { x, y, ...attributes }).textContent = content;
    }
  }

  class HeatMap extends Drawing {
    constructor(plot, spec) {
      super(plot, spec);
      plot.addEventListener("pointermove", (event) => {
        const frame = plot.getBoundingClientRect();
        const column = Math.floor((event.clientX - frame.left - this.left) / this.cell);
        const row = Math.floor((event.clientY - frame.top - this.top) / this.tall);
        const share = spec.values[row]?.[column];
        if (share === undefined) return this.tip.hide();
        this.tip.show(this.left + column * this.cell, [
          { name: spec.x, value: spec.columns[column] }, { name: spec.y, value: spec.labels[row] }, { name: "share", value: `${share} %` },
        ]);
      });
    }

    draw() {
      const { values, columns, ticks, labels, x, y } = this.spec, wide = (this.width = this.plot.clientWidth);
      if (!wide) return; // not laid out yet
      const longest = Math.floor(wide / 3 / LETTER);
      const short = labels.map((label) => (label.length > longest ? `${label.slice(0, longest - 1)}…` : label));
      this.tall = values.length > 12 ? 14 : 20;
      this.top = 24;
      this.left = Math.max(...short.map((label) => label.length), 2) * LETTER + 10;
      this.cell = (wide - this.left - 4) / Math.max(values[0].length, 1);
      const bottom = this.top + values.length * this.tall, height = bottom + (ticks ? 40 : 24);
      this.begin(wide, height);
      values.forEach((row, i) => {
        const top = this.top + i * this.tall;
        this.text(this.left - 6, top + this.tall / 2 + 4, short[i], { "text-anchor": "end" });
        row.forEach((share, j) => shape("rect", this.svg, {
          x: this.left + j * this.cell, y: top, width: this.cell + 0.3, height: this.tall - 1,
          fill: "var(--series-0)", "fill-opacity": Math.sqrt(share / 100).toFixed(2),
        }));
      });
      if (ticks) this.names(columns, bottom + 14);
      const half = (x.length * LETTER) / 2;
      this.text(Math.min((this.left + wide) / 2, wide - half), height - 6, x, { "text-anchor": "middle", class: "label" });
      this.text(2, 13, y, { class: "label" });
    }

    // As many names of columns as there is room for; the last one ends where the chart does.
    names(columns, y) {
      const longest = Math.max(...columns.map((name) => name.length)) * LETTER + 10;
      const every = Math.ceil(longest / this.cell);
      columns.forEach((name, i) => {
        if (i % every) return;
        const middle = this.left + (i + 0.5) * this.cell;
        const end = middle + (name.length * LETTER) / 2 > this.width;
        this.text(end ? this.width : middle, y, name, { "text-anchor": end ? "end" : "middle" });
      });
    }
  }

  // A row for each device, with its tasks as bars; releases are vertical lines.
  class Timeline extends Drawing {
    constructor(plot, spec) {
      super(plot, spec);
      plot.parentElement.style.gridColumn = "1 / -1";
      plot.addEventListener("pointermove", ({ target }) => (target.dataset.bar ? this.show(+target.dataset.bar) : this.tip.hide()));
      plot.addEventListener("keydown", (event) => {
        const last = this.bars.length - 1, at = this.at ?? -1;
        const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
        if (event.key === "Escape") this.tip.hide();
        if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        this.show(Math.max(0, Math.min(last, to)), true);
      });
    }

    draw() {
      const { rows, releases, until } = this.spec, wide = (this.width = this.plot.clientWidth), tall = 20, top = 30;
      if (!wide) return; // not laid out yet
      const left = Math.max(...rows.map(({ client }) => `${client}`.length), 6) * LETTER + 10, bottom = top + rows.length * tall;
      this.x = (time) => left + ((wide - left - 8) * Math.min(time, until)) / until;
      this.begin(wide, bottom + 40);
      const { svg } = this, line = (from, to, y1, y2, stroke) => shape("line", svg, { x1: this.x(from), x2: this.x(to), y1, y2, stroke });
      // As many names as there is room for, from left to right.
      const names = (all, y) => all.reduce((free, [time, name]) => {
        const half = (`${name}`.length * LETTER) / 2, x = Math.min(this.x(time), wide - half);
        if (x - half < free) return free;
        this.text(x, y, name, { "text-anchor": "middle" });
        return x + half + 6;
      }, 0);
      releases.forEach(([time]) => line(time, time, top - 4, bottom, "var(--frame)"));
      names(releases, top - 8);
      rows.forEach(({ client }, row) => this.text(left - 6, top + row * tall + 14, client, { "text-anchor": "end" }));
      const rough = (110 * until) / wide, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((digit) => digit * power >= rough) * power;
      names(Array.from({ length: Math.floor(until / step) + 1 }, (_, k) => [k * step, tickText(k * step, step, "")]), bottom + 14);
      for (const [x, y, name, anchor] of [[left - 6, top - 8, "client", "end"], [left, 10, "release", "start"], [(left + wide) / 2, bottom + 32, "virtual seconds", "middle"]]) {
        this.text(x, y, name, { "text-anchor": anchor, class: "label" });
      }
      let count = 0;
      this.bars = rows.flatMap(({ client, bars }, row) => bars.map(([from, to, version, release, handed, failed]) => {
        const x = this.x(from), y = top + row * tall, width = Math.max(this.x(to) - x - 1, 2), late = release - 1 - version;
        const stroke = `var(--${failed ? "series-1" : release ? "series-0" : "muted"})`, strong = failed || !release ? 0 : Math.max((1 + late) ** -0.5, 0.2);
        if (handed > to) line(to, handed, y + 10, y + 10, stroke);
        shape("rect", svg, { x, y: y + 3, width, height: tall - 6, rx: 2, fill: "var(--surface)" });
        const rect = shape("rect", svg, { x, y: y + 3, width, height: tall - 6, rx: 2, stroke, fill: stroke, "fill-opacity": strong, "data-bar": count++ });
        if (failed) rect.setAttribute("stroke-dasharray", "3 2");
        if (width > `${version}`.length * LETTER + 4) {
          this.text(x + width / 2, y + 14, version, { "text-anchor": "middle", style: `pointer-events:none;fill:var(--${strong > 0.65 ? "background" : "ink"})` });
        }
        const result = failed ? "a zero: it dropped out" : `${late} version${late === 1 ? "" : "s"} late`;
        return { x, rect, facts: [
          { name: "client", value: client }, { name: "trains version", value: version }, { name: "seconds", value: `${number(from)} to ${number(to)}` },
          { name: "in release", value: release ? `${release}, ${result}` : "none: the run ends before" },
        ] };
      }));
    }

    show(at, spoken) {
      this.bars[this.at]?.rect.removeAttribute("stroke-width");
      const { x, rect, facts } = this.bars[(this.at = at)];
      rect.setAttribute("stroke-width", 3);
      this.tip.show(x, facts, spoken);
    }
  }

  function sortable(table) {
    const body = table.tBodies[0];
    table.querySelectorAll("thead th").forEach((heading, column) => {
      const button = element("button", null, "sort", heading.textContent);
      button.type = "button";
      heading.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("thead th").forEach((each) => each.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[column], given = cell.dataset.value;
          return given === undefined ? cell.textContent : Number(given);
        };
        const empty = (each) => each === "–" || each === "" || Number.isNaN(each);
        const order = [...body.rows].sort((one, other) => {
          const a = value(one), b = value(other);
          if (empty(a) || empty(b)) return empty(a) - empty(b); // the unknown stands last
          const sign = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
          return down ? -sign : sign;
        });
        body.append(...order);
      });
    });
  }

  for (const plot of document.querySelectorAll("[data-chart]")) {
    const spec = JSON.parse(document.getElementById(plot.dataset.chart).textContent);
    new ({ heat: HeatMap, timeline: Timeline }[spec.kind] ?? Chart)(plot, spec);
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
})();
