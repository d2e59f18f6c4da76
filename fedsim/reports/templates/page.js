"use strict";
// Draws the charts of a page from the JSON beside each, and sorts tables. No libraries.
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const FONT = 12, LETTER = 6.7;

  function element(name, parent, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  function shape(name, parent, attributes) {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.append(made);
    return made;
  }

  const colour = (index) => `var(--series-${index % SERIES})`;
  const SERIES = 8;
  const DASHES = JSON.parse(document.getElementById("dashes").textContent);

  const RULES = ["3 3", "9 4", "1 4"]; // lines that were not measured

  // Paths around the origin, in the order of plots.MARKERS.
  const MARKERS = [
    "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z", "M-3.5 -3.5H3.5V3.5H-3.5Z", "M0 -4.5L4.3 3.4H-4.3Z",
    "M0 -4.8L4.8 0L0 4.8L-4.8 0Z", "M0 4.5L4.3 -3.4H-4.3Z",
    "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "M-4.5 -2.5L-2.5 -4.5L0 -2L2.5 -4.5L4.5 -2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0Z",
    "M0 -5L1.3 -1.7L4.8 -1.5L2.1 .7L3 4.1L0 2.2L-3 4.1L-2.1 .7L-4.8 -1.5L-1.3 -1.7Z",
  ];

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

  // As few digits as tell neighbouring ticks apart.
  function tickText(value, step, unit) {
    if (unit === BYTES) return bytes(value, 6);
    const factor = unit === SHARE ? 100 : 1, sign = unit === SHARE ? " %" : "";
    const shown = value * factor, apart = step * factor;
    const size = Math.abs(shown);
    if (size >= 1e15 || (size > 0 && size < 1e-4)) return shown.toExponential(1) + sign;
    if (size >= 1e6) return shown.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 6 }) + sign;
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(apart) + 1e-9)));
    return shown.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + sign;
  }

  function ticksOf(low, high, count, whole) {
    const rough = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
    if (whole) step = Math.max(1, Math.round(step));
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0);
    return { ticks, step };
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
      for (const digit of high / low > 1e3 ? [1] : [1, 2, 5]) {
        const tick = digit * 10 ** p;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  }

  class Chart {
    constructor(plot, spec) {
      this.plot = plot;
      this.spec = spec;
      this.unit = unitOf(spec);
      this.tip = element("div", plot.parentElement, "tip");
      this.tip.hidden = true;
      this.announcer = element("div", plot.parentElement, "unseen");
      this.announcer.setAttribute("aria-live", "polite");
      plot.addEventListener("pointerleave", () => this.leave());
      plot.addEventListener("blur", () => this.leave());
      this.width = 0;
      new ResizeObserver(() => {
        if (Math.abs(plot.clientWidth - this.width) > 1) this.draw();
      }).observe(plot);
    }

    leave() {
      this.tip.hidden = true;
    }

    frame(height) {
      this.width = this.plot.clientWidth;
      this.height = height;
      this.plot.querySelector("svg")?.remove();
      this.svg = shape("svg", this.plot, {
        viewBox: `0 0 ${this.width} ${height}`, width: this.width, height, "aria-hidden": "true",
      });
    }

    text(x, y, content, attributes = {}) {
      const made = shape("text", this.svg, { x, y, ...attributes });
      made.textContent = content;
      return made;
    }

    // Names of the axes; that of x lies further left where it would be cut off.
    axisNames(left, right, bottom) {
      const half = (this.spec.x.length * LETTER) / 2;
      this.text(Math.min((left + right) / 2, right - half), bottom, this.spec.x, { "text-anchor": "middle", class: "label" });
      this.text(2, 13, this.spec.y, { class: "label" });
    }

    show(left, lines) {
      this.tip.replaceChildren();
      const phrases = [];
      for (const [index, line] of lines.entries()) {
        const row = element("div", this.tip, index ? "" : "head");
        if (line.key !== undefined) row.append(swatch(line.key, line.reference));
        element("span", row, "", line.name);
        if (line.value !== undefined) element("b", row, "", line.value);
        phrases.push(`${line.name} ${line.value ?? ""}`);
      }
      this.tip.hidden = false;
      const plot = this.plot, room = plot.clientWidth, wide = this.tip.offsetWidth;
      const place = left + 14 + wide > room ? left - wide - 14 : left + 14;
      this.tip.style.left = `${plot.offsetLeft + Math.min(Math.max(place, 0), Math.max(room - wide, 0))}px`;
      this.tip.style.top = `${plot.offsetTop + 24}px`;
      return phrases.join(", ");
    }
  }

  function swatch(index, reference) {
    const made = shape("svg", null, { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    shape("line", made, {
      x1: 1, x2: 25, y1: 6, y2: 6, "stroke-width": reference ? 1.5 : 2,
      stroke: reference ? "var(--muted)" : colour(index),
      "stroke-dasharray": reference ? RULES[index % RULES.length] : DASHES[index % SERIES],
    });
    if (!reference) shape("path", made, { d: MARKERS[index % SERIES], fill: colour(index), transform: "translate(13 6)" });
    return made;
  }

  class LineChart extends Chart {
    constructor(plot, spec) {
      super(plot, spec);
      this.hidden = new Set();
      this.series = spec.series.map((line, index) => ({ ...line, index }));
      this.all = [...new Set(this.series.flatMap((line) => line.x))].sort((a, b) => a - b);
      this.zoomed = null;
      this.log = false;
      this.cursor = null;
      this.tools();
      this.listen();
      this.draw();
    }

    tools() {
      const bar = element("div", null, "tools");
      const legend = element("div", bar, "legend");
      if (this.series.length > 1) {
        for (const line of this.series) {
          const key = element("button", legend, "key");
          key.type = "button";
          key.setAttribute("aria-pressed", "true");
          key.title = "Show or hide";
          key.append(swatch(line.index, line.reference));
          element("span", key, "", line.name);
          key.addEventListener("click", () => {
            const off = !this.hidden.delete(line.index);
            if (off) this.hidden.add(line.index);
            key.setAttribute("aria-pressed", String(!off));
            this.draw();
          });
        }
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
      if (this.all.length > 2) {
        button("+", "Zoom in", () => this.zoom(0.5));
        button("−", "Zoom out", () => this.zoom(2));
        this.reset = button("Reset", "Reset the zoom", () => this.zoomTo(null));
      }
      const values = this.series.flatMap((line) => [...line.y, ...(line.low ?? [])]).filter((y) => y !== null);
      if (!this.spec.percent && !this.spec.square && !this.spec.counts && values.length > 2 && Math.min(...values) > 0) {
        const toggle = button("Log", "Logarithmic scale", () => {
          this.log = !this.log;
          toggle.setAttribute("aria-pressed", String(this.log));
          this.draw();
        });
        toggle.setAttribute("aria-pressed", "false");
      }
      this.plot.before(bar);
    }

    get visible() {
      return this.series.filter((line) => !this.hidden.has(line.index));
    }

    domain() {
      if (this.zoomed) return this.zoomed;
      const first = this.all[0] ?? 0, last = this.all[this.all.length - 1] ?? 1;
      return first === last ? [first - 1, last + 1] : [first, last];
    }

    range([from, to]) {
      let low = Infinity, high = -Infinity;
      for (const line of this.visible) {
        line.x.forEach((x, i) => {
          if (x < from || x > to) return;
          for (const y of [line.y[i], line.low?.[i], line.high?.[i]]) {
            if (y === null || y === undefined || (this.log && y <= 0)) continue;
            low = Math.min(low, y);
            high = Math.max(high, y);
          }
        });
      }
      if (low > high) return [0, 1];
      if (this.spec.square) return [0, 1];
      if (this.log) return [low / 1.05, high * 1.05];
      if (this.spec.counts || (this.spec.from_zero && low > 0 && !this.zoomed)) low = 0;
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      const bottom = low >= 0 && low - room < 0 ? 0 : low - room;
      return [bottom, this.spec.percent && high <= 1 ? Math.min(high + room, 1.0) : high + room];
    }

    draw() {
      const wide = this.plot.clientWidth;
      if (!wide) return;
      this.frame(this.spec.square ? Math.min(wide, 340) : Math.max(210, Math.min(0.52 * wide, 300)));
      const [from, to] = this.domain();
      let [low, high] = this.range([from, to]);
      if (low === high) [low, high] = [low - 1, high + 1];
      const rows = this.log ? { ticks: logTicks(low, high), step: 0 } : ticksOf(low, high, 5, this.spec.counts);
      const labels = rows.ticks.map((tick) => (this.log ? number(tick, this.unit) : tickText(tick, rows.step, this.unit)));
      const left = Math.max(...labels.map((label) => label.length), 2) * LETTER + 14;
      const box = { left, right: wide - 14, top: 26, bottom: this.height - 38 };
      this.box = box;
      this.toX = (x) => box.left + ((x - from) / (to - from)) * (box.right - box.left);
      const scaled = (y) => (this.log ? Math.log(y / low) / Math.log(high / low) : (y - low) / (high - low));
      this.toY = (y) => box.bottom - scaled(y) * (box.bottom - box.top);
      this.fromX = (pixel) => from + ((pixel - box.left) / (box.right - box.left)) * (to - from);
      this.axes(rows, labels, from, to);
      const clip = `clip-${this.plot.dataset.chart}`;
      const shapes = shape("clipPath", this.svg, { id: clip });
      shape("rect", shapes, { x: box.left - 5, y: box.top - 5, width: box.right - box.left + 10, height: box.bottom - box.top + 10 });
      const inside = shape("g", this.svg, { "clip-path": `url(#${clip})` });
      for (const line of this.visible) this.line(line, inside, from, to);
      this.cross = shape("g", this.svg, { class: "cross" });
      if (this.reset) this.reset.disabled = this.zoomed === null;
    }

    axes(rows, labels, from, to) {
      const { left, right, top, bottom } = this.box;
      rows.ticks.forEach((tick, i) => {
        const y = this.toY(tick);
        shape("line", this.svg, { x1: left, x2: right, y1: y, y2: y, class: "grid" });
        this.text(left - 7, y + 4, labels[i], { "text-anchor": "end" });
      });
      const whole = this.all.every(Number.isInteger);
      const { ticks, step } = ticksOf(from, to, Math.max(2, Math.floor((right - left) / 80)), whole);
      for (const tick of ticks) {
        const x = this.toX(tick);
        shape("line", this.svg, { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "frame" });
        const text = tickText(tick, step, this.spec.square ? SHARE : "");
        const end = x + (text.length * LETTER) / 2 > this.width;
        this.text(end ? this.width : x, bottom + 18, text, { "text-anchor": end ? "end" : "middle" });
      }
      shape("line", this.svg, { x1: left, x2: right, y1: bottom, y2: bottom, class: "frame" });
      this.axisNames(left, right, this.height - 4);
    }

    line(line, inside, from, to) {
      const points = [];
      line.x.forEach((x, i) => {
        const near = (line.x[i + 1] ?? x) >= from && (line.x[i - 1] ?? x) <= to;
        const there = line.y[i] !== null && !(this.log && line.y[i] <= 0);
        if (near) points.push(there ? [this.toX(x), this.toY(line.y[i]), i] : null);
      });
      const stroke = line.reference ? "var(--muted)" : colour(line.index);
      if (line.low) {
        const real = points.filter((point) => point && line.low[point[2]] !== null && line.high[point[2]] !== null);
        const floor = this.log ? Math.min(...line.y.filter((y) => y > 0)) / 10 : -Infinity;
        const edge = (side) => real.map(([x, , i]) => `${x.toFixed(1)} ${this.toY(Math.max(line[side][i], floor)).toFixed(1)}`);
        if (real.length > 1) {
          shape("path", inside, { d: `M${edge("high").join("L")}L${edge("low").reverse().join("L")}Z`, fill: stroke, opacity: 0.2 });
        } else if (real.length) {
          const [x, , i] = real[0];
          shape("path", inside, { d: `M${x} ${this.toY(line.low[i])}V${this.toY(line.high[i])}`, stroke, "stroke-width": 2 });
        }
      }
      let path = "", broken = true;
      for (const point of points) {
        if (point) path += `${broken ? "M" : "L"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
        broken = !point;
      }
      shape("path", inside, {
        d: path || "M0 0", fill: "none", stroke, "stroke-width": line.reference ? 1.5 : 2,
        "stroke-linejoin": "round", "stroke-dasharray": line.reference ? RULES[line.index % RULES.length] : DASHES[line.index % SERIES],
      });
      if (line.reference) return;
      const real = points.filter(Boolean);
      const every = real.length <= 12 ? 1 : Math.ceil(real.length / 8);
      real.forEach(([x, y], i) => {
        const turn = real.length <= 12 || (i - Math.floor((line.index * every) / SERIES)) % every === 0;
        if (turn) shape("path", inside, { d: MARKERS[line.index % SERIES], fill: stroke, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
      });
    }

    listen() {
      const plot = this.plot;
      const where = (event) => event.clientX - plot.getBoundingClientRect().left;
      let start = null, area = null;
      plot.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "touch" && event.button === 0) start = where(event);
      });
      plot.addEventListener("pointermove", (event) => {
        const x = where(event);
        if (start !== null && Math.abs(x - start) > 6) {
          area ??= shape("rect", this.svg, { y: this.box.top, height: this.box.bottom - this.box.top, class: "area" });
          area.setAttribute("x", Math.min(x, start));
          area.setAttribute("width", Math.abs(x - start));
        }
        this.point(this.fromX(x));
      });
      const finish = (event) => {
        if (area) this.zoomTo([this.fromX(start), this.fromX(where(event))].sort((a, b) => a - b));
        start = area = null;
      };
      plot.addEventListener("pointerup", finish);
      plot.addEventListener("pointerleave", () => {
        area?.remove();
        start = area = null;
      });
      plot.addEventListener("dblclick", () => this.zoomTo(null));
      plot.addEventListener("keydown", (event) => {
        const many = event.shiftKey ? 10 : 1;
        const acts = {
          ArrowLeft: () => this.step(-many), ArrowRight: () => this.step(many),
          Home: () => this.step(-Infinity), End: () => this.step(Infinity),
          "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
          0: () => this.zoomTo(null), Escape: () => { this.leave(); this.zoomTo(null); },
        };
        if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        acts[event.key]();
      });
    }

    zoom(factor) {
      const [from, to] = this.domain();
      const middle = this.cursor !== null && this.cursor >= from && this.cursor <= to ? this.cursor : (from + to) / 2;
      this.zoomTo([middle - (middle - from) * factor, middle + (to - middle) * factor]);
    }

    zoomTo(wanted) {
      const first = this.all[0], last = this.all[this.all.length - 1];
      this.zoomed = wanted && [Math.max(wanted[0], first), Math.min(wanted[1], last)];
      if (this.zoomed && (this.zoomed[1] - this.zoomed[0] >= last - first || this.zoomed[1] <= this.zoomed[0])) this.zoomed = null;
      this.draw();
    }

    step(by) {
      const [from, to] = this.domain();
      const inside = this.all.filter((x) => x >= from && x <= to);
      if (!inside.length) return;
      const now = this.cursor === null ? (by > 0 ? -1 : inside.length) : inside.indexOf(nearest(inside, this.cursor));
      const next = inside[Math.max(0, Math.min(inside.length - 1, now + by))];
      this.announcer.textContent = this.point(next);
    }

    point(x) {
      const [from, to] = this.domain();
      const inside = this.all.filter((each) => each >= from && each <= to);
      if (!inside.length || !this.cross) return "";
      const at = nearest(inside, x);
      this.cursor = at;
      this.cross.replaceChildren();
      const pixel = this.toX(at);
      shape("line", this.cross, { x1: pixel, x2: pixel, y1: this.box.top, y2: this.box.bottom, class: "cursor" });
      const lines = [{ name: this.spec.x, value: number(at, this.spec.square ? SHARE : "") }];
      for (const line of this.visible) {
        const close = nearest(line.x, at), i = line.x.indexOf(close);
        if (i < 0 || line.y[i] === null || Math.abs(close - at) > (to - from) / 40) continue;
        const band = line.low && line.low[i] !== null ? ` (${number(line.low[i], this.unit)} to ${number(line.high[i], this.unit)})` : "";
        lines.push({ key: line.index, reference: line.reference, name: line.name, value: number(line.y[i], this.unit) + band });
        const y = this.toY(line.y[i]);
        if (Number.isFinite(y)) shape("circle", this.cross, { cx: this.toX(close), cy: y, r: 5, fill: "none", "stroke-width": 2, stroke: line.reference ? "var(--muted)" : colour(line.index) });
      }
      return this.show(pixel, lines);
    }

    leave() {
      super.leave();
      this.cross?.replaceChildren();
    }
  }

  function nearest(sorted, x) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(sorted[high] - x) < Math.abs(sorted[low] - x) ? sorted[high] : sorted[low];
  }

  class BarChart extends Chart {
    constructor(plot, spec) {
      super(plot, spec);
      this.chosen = -1;
      plot.addEventListener("pointermove", (event) => {
        const x = event.clientX - plot.getBoundingClientRect().left - this.box.left;
        this.choose(Math.floor((x / (this.box.right - this.box.left)) * spec.values.length));
      });
      arrows(plot, (by) => { this.announcer.textContent = this.choose(this.chosen + by) ?? ""; });
      this.draw();
    }

    draw() {
      const wide = this.plot.clientWidth, { values, labels, percent } = this.spec;
      if (!wide) return;
      this.frame(Math.max(190, Math.min(0.45 * wide, 260)));
      const high = Math.max(...values, percent ? 0.01 : 1) * 1.05;
      const rows = ticksOf(0, high, 4, !percent);
      const texts = rows.ticks.map((tick) => tickText(tick, rows.step, this.unit));
      const left = Math.max(...texts.map((text) => text.length)) * LETTER + 14;
      const box = { left, right: wide - 8, top: 26, bottom: this.height - 38 };
      this.box = box;
      const toY = (value) => box.bottom - (value / high) * (box.bottom - box.top);
      rows.ticks.forEach((tick, i) => {
        shape("line", this.svg, { x1: left, x2: box.right, y1: toY(tick), y2: toY(tick), class: "grid" });
        this.text(left - 7, toY(tick) + 4, texts[i], { "text-anchor": "end" });
      });
      const step = (box.right - left) / values.length;
      columnTicks(labels, step, wide, left).forEach(([x, anchor, name]) => this.text(x, box.bottom + 17, name, { "text-anchor": anchor }));
      this.bars = values.map((value, i) => {
        const x = left + i * step;
        const thick = Math.min(Math.max(step * 0.84, 0.5), 72);
        return shape("rect", this.svg, {
          x: x + (step - thick) / 2, width: thick, y: toY(value), height: Math.max(box.bottom - toY(value), 0), fill: colour(0),
        });
      });
      shape("line", this.svg, { x1: left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "frame" });
      this.axisNames(left, box.right, this.height - 4);
    }

    choose(index) {
      const { values, labels, x, y } = this.spec;
      if (index < 0 || index >= values.length) return;
      this.bars[this.chosen]?.setAttribute("fill", colour(0));
      this.chosen = index;
      this.bars[index].setAttribute("fill", colour(1));
      const middle = this.box.left + ((index + 0.5) / values.length) * (this.box.right - this.box.left);
      return this.show(middle, [{ name: x, value: labels[index] }, { name: y, value: number(values[index], this.unit) }]);
    }

    leave() {
      super.leave();
      this.bars?.[this.chosen]?.setAttribute("fill", colour(0));
      this.chosen = -1;
    }
  }

  class HeatChart extends Chart {
    constructor(plot, spec) {
      super(plot, spec);
      plot.addEventListener("pointermove", (event) => {
        const frame = plot.getBoundingClientRect();
        const column = Math.floor((event.clientX - frame.left - this.left) / this.cell);
        const row = Math.floor((event.clientY - frame.top - this.top) / this.tall);
        const share = spec.values[row]?.[column];
        if (share === undefined) return this.leave();
        this.show(this.left + column * this.cell, [
          { name: spec.x, value: spec.columns[column] }, { name: spec.y, value: spec.labels[row] }, { name: "share", value: `${share} %` },
        ]);
      });
      this.draw();
    }

    draw() {
      const wide = this.plot.clientWidth, { values, columns, ticks } = this.spec;
      if (!wide) return;
      const longest = Math.floor(wide / 3 / LETTER);
      const labels = this.spec.labels.map((label) => (label.length > longest ? `${label.slice(0, longest - 1)}…` : label));
      this.tall = values.length > 12 ? 14 : 20;
      this.top = 24;
      this.left = Math.max(...labels.map((label) => label.length), 2) * LETTER + 10;
      const bottom = this.top + values.length * this.tall;
      this.frame(bottom + (ticks ? 40 : 24));
      this.cell = (wide - this.left - 4) / Math.max(values[0].length, 1);
      values.forEach((row, i) => {
        const y = this.top + i * this.tall;
        if (this.tall >= FONT) this.text(this.left - 6, y + this.tall / 2 + 4, labels[i], { "text-anchor": "end" });
        row.forEach((share, j) => {
          shape("rect", this.svg, {
            x: this.left + j * this.cell, y, width: this.cell + 0.3, height: this.tall - 1, fill: "var(--series-0)",
            "fill-opacity": Math.sqrt(share / 100).toFixed(2),
          });
        });
      });
      if (ticks) columnTicks(columns, this.cell, wide, this.left).forEach(([x, anchor, name]) => this.text(x, bottom + 14, name, { "text-anchor": anchor }));
      this.axisNames(this.left, wide, this.height - 6);
    }
  }

  // As many of the columns' names as there is room for, and where they stand.
  function columnTicks(names, step, wide, left) {
    const longest = Math.max(...names.map((name) => name.length)) * LETTER + 10;
    const every = Math.ceil(longest / step);
    return names.flatMap((name, i) => {
      if (i % every) return [];
      const middle = left + (i + 0.5) * step;
      return [middle + (name.length * LETTER) / 2 > wide ? [wide, "end", name] : [middle, "middle", name]];
    });
  }

  function arrows(plot, act) {
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      act(by);
    });
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

  const KINDS = { lines: LineChart, bars: BarChart, heat: HeatChart };
  for (const plot of document.querySelectorAll("[data-chart]")) {
    const spec = JSON.parse(document.getElementById(plot.dataset.chart).textContent);
    new KINDS[spec.kind](plot, spec);
  }
  document.querySelectorAll("table.sortable").forEach(sortable);
})();
