"use strict";
// Draws what a page holds as data: <figure data-chart='...'>, as flatout/view/charts.py makes it, and the lanes of
// <div data-lanes='...'>. The marks of a plot stretch to the width of its card; labels are HTML beside them.
const charts = (() => {
  const WIDTH = 1000, HEIGHT = 240, NUM_COLORS = 8, NUM_SHADES = 9, MAX_DOTS = 40;
  const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

  const colorOf = (index) => `c${index % NUM_COLORS}${index >= NUM_COLORS ? " dashed" : ""}`;
  const least = (values) => values.reduce((a, b) => (b !== null && b < a ? b : a), Infinity);
  const greatest = (values) => values.reduce((a, b) => (b !== null && b > a ? b : a), -Infinity);

  // Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at most `count` + 1; whole numbers only if `isWhole`.
  function niceTicks(low, high, count, isWhole = false) {
    const width = Math.max((high - low) / count, isWhole ? 1 : 0), power = 10 ** Math.floor(Math.log10(width)), ticks = [];
    const step = [1, 2, 5, 10].map((part) => part * power).find((one) => one >= width * 0.999);
    for (let index = Math.ceil(low / step - 1e-9); index <= Math.floor(high / step + 1e-9); index++) ticks.push(index * step);
    return ticks;
  }

  // Powers of ten, with their multiples by 2 and 5 where there is room; none within a decade.
  function logTicks(low, high, count) {
    let inside = [];
    for (const parts of [[1, 2, 5], [1, 3], [1]]) {
      inside = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        inside.push(...parts.map((part) => part * 10 ** power).filter((one) => one >= low * 0.999 && one <= high * 1.001));
      }
      if (inside.length <= count + 2) break;
    }
    const every = Math.ceil(inside.length / (count + 2));
    return inside.length > 2 ? inside.filter((_, index) => index % every === 0) : [];
  }

  // A value as an axis shows it, as exact as `step` needs: 0.25, 1.5k, 2e-4.
  function tickLabel(value, step) {
    const size = Math.abs(value);
    if (size < step * 1e-6 || value === 0) return "0";
    let [unit, suffix] = SUFFIXES.find(([one]) => size >= one) ?? [1, ""];
    if (suffix === "k" && size < 10_000 && step < 1000 && step >= 1) [unit, suffix] = [1, ""];
    if (size < 1e-3) {
      const power = Math.floor(Math.log10(size) + 1e-9);
      return `${Number((value / 10 ** power).toFixed(2))}e${power}`;
    }
    const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)));
    return (value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + suffix;
  }

  // An axis from `low` to `high`: the share of its length at a value, and about `count` ticks as [share, label].
  function scale(low, high, isLog = false, isWhole = false) {
    const [from, to] = isLog ? [Math.log(low), Math.log(high)] : [low, high];
    const share = (value) => ((isLog ? Math.log(value) : value) - from) / (to - from);
    function ticks(count) {
      const powers = isLog ? logTicks(low, high, count) : [], values = powers.length ? powers : niceTicks(low, high, count, isWhole);
      const step = values.length > 1 ? least(values.slice(1).map((one, index) => one - values[index])) : high - low || 1;
      // values of many sizes are labelled each by its own; a tick at an end may round to a value beyond it
      return values.map((one) => [Math.min(1, Math.max(0, share(one))), tickLabel(one, powers.length ? one : step)]);
    }
    return { share, ticks };
  }

  // high - low; 0 if they differ by rounding only, since no two ticks would then differ.
  const span = (low, high) => (high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)) ? high - low : 0);

  // Steps, tokens, samples and experts are counted; only time has fractions.
  const isCounted = (axis) => axis !== "time";
  const xScale = (low, high, axis) => (span(low, high) ? scale(low, high, false, isCounted(axis)) : scale(low - 0.5, low + 0.5, false, isCounted(axis)));

  // With some room above `high`, and below `low` unless that is 0.
  function yScale(low, high, isLog = false, isWhole = false) {
    if (isLog) return scale(low / 1.1, high * 1.1, true);
    const room = span(low, high) || Math.abs(high) || 1;
    return scale(low ? low - 0.05 * room : 0, high + 0.06 * room, false, isWhole);
  }

  const xOf = (chart, one, axis) => (one.x ?? chart.x)[axis];
  const place = ({ across, up }, x, y) => `${(across.share(x) * WIDTH).toFixed(1)},${((1 - up.share(y)) * HEIGHT).toFixed(1)}`;

  // A path with a gap at each null; a point alone is a dot, as is each point with `areDots`.
  function line(axes, xs, ys, areDots = false) {
    let path = "", length = 0;
    ys.forEach((y, index) => {
      if (y === null) {
        length = 0;
        return;
      }
      const isNew = areDots || length === 0, isAlone = areDots || (isNew && (ys[index + 1] ?? null) === null);
      path += `${isNew ? "M" : " "}${place(axes, xs[index], y)}${isAlone ? "h0" : ""}`;
      length += 1;
    });
    return path;
  }

  const tip = (name, color, { across }, x, y) => ({ name, color, x, y, places: x.map((one) => across.share(one) * WIDTH) });

  // Each kind returns its axes, its marks as [class, path], and what the pointer shows; null without a mark.
  const kinds = {
    // the first line on top, dots above all
    lines(chart, axis, isLog) {
      const keep = (ys) => ys.map((y) => (y !== null && (!isLog || y > 0) ? y : null));
      const drawn = chart.series.map((one, index) => ({ ...one, color: colorOf(index), x: xOf(chart, one, axis), y: keep(one.y) }))
        .filter((one) => one.y.some((y) => y !== null));
      if (!drawn.length) return null;
      const xs = drawn.flatMap((one) => one.x), ys = drawn.flatMap((one) => one.y), low = least(ys);
      const axes = {
        across: xScale(least(xs), greatest(xs), axis), up: yScale(chart.zero ? Math.min(0, low) : low, greatest(ys), isLog),
      };
      const below = [], above = [];
      for (const one of drawn) {
        const marks = [[`line ${one.color}${one.smooth ? " faint" : ""}`, line(axes, one.x, one.y)]];
        if (one.smooth) marks.push([`line ${one.color}`, line(axes, one.x, keep(one.smooth))]);
        if (!one.dots) {
          below.unshift(...marks);
          continue;
        }
        above.push(...marks);
        if (one.x.length <= MAX_DOTS) above.push([`dots ${one.color}`, line(axes, one.x, one.y, true)]);
      }
      // of a shortened series the mean says more than the extremes
      const tips = drawn.map((one) => tip(one.name, one.color, axes, one.x, one.short && one.smooth ? one.smooth : one.y));
      return { axes, marks: [...below, ...above], tips };
    },

    // stacked, the first at the bottom; one point is as wide as the plot
    areas(chart, axis) {
      let xs = chart.x[axis], parts = chart.series.map((one) => one.y);
      if (xs.length === 1) [xs, parts] = [[xs[0] - 0.5, xs[0] + 0.5], parts.map(([y]) => [y, y])];
      const tops = [xs.map(() => 0)];
      for (const part of parts) tops.push(part.map((y, index) => tops.at(-1)[index] + y));
      const axes = { across: xScale(xs[0], xs.at(-1), axis), up: yScale(0, greatest(tops.at(-1))) };
      const points = (ys) => xs.map((x, index) => place(axes, x, ys[index]));
      const marks = parts.map((_, index) =>
        [`area ${colorOf(index)}`, `M${[...points(tops[index + 1]), ...points(tops[index]).reverse()].join(" ")}z`]);
      return { axes, marks, tips: chart.series.map((one, index) => tip(one.name, colorOf(index), axes, xs, parts[index])).reverse() };
    },

    // a histogram: n + 1 edges, n counts
    bars(chart, axis) {
      const edges = chart.x[axis], [{ name, y }] = chart.series;
      const axes = { across: xScale(edges[0], edges.at(-1), axis), up: yScale(0, greatest(y), false, true) };
      const marks = y.map((count, index) => {
        const corners = [[edges[index], 0], [edges[index], count], [edges[index + 1], count], [edges[index + 1], 0]];
        return ["bar c0", count ? `M${corners.map(([a, b]) => place(axes, a, b)).join(" ")}z` : ""];
      }).filter(([, path]) => path);
      return { axes, marks, tips: [tip(name, "c0", axes, y.map((_, index) => (edges[index] + edges[index + 1]) / 2), y)] };
    },

    // a strip for each row, from light for 0 to dark for `full` and above
    strips(chart, axis) {
      const xs = chart.x[axis], rows = chart.series, height = HEIGHT / rows.length, cells = {};
      const axes = { across: xScale(xs[0], xs.at(-1), axis), up: yScale(0, chart.full) };
      const inner = xs.slice(1).map((x, index) => axes.across.share((x + xs[index]) / 2) * WIDTH), columns = [0, ...inner, WIDTH];
      rows.forEach((row, at) => row.y.forEach((value, column) => {
        const shade = Math.min(NUM_SHADES, Math.max(0, Math.round(((value ?? 0) / chart.full) * NUM_SHADES)));
        const width = (columns[column + 1] - columns[column]).toFixed(1);
        cells[shade] = `${cells[shade] ?? ""}M${columns[column].toFixed(1)} ${(at * height).toFixed(1)}h${width}v${height.toFixed(1)}h-${width}z`;
      }));
      const marks = Object.entries(cells).map(([shade, path]) => [`heat s${shade}`, path]);
      return { axes, marks, tips: rows.map((row) => tip(row.name, "c0", axes, xs, row.y)), rows: rows.map((row) => row.name) };
    },
  };

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function picture(viewBox, label, marks) {
    const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
    const facts = { viewBox, preserveAspectRatio: "none", role: "img", "aria-label": label };
    for (const [key, value] of Object.entries(facts)) svg.setAttribute(key, value);
    for (const [style, d] of marks) {
      const path = document.createElementNS(space, "path");
      path.setAttribute("class", style);
      path.setAttribute("d", d);
      svg.append(path);
    }
    return svg;
  }

  function labels(ticks, side) {
    return ticks.map(([at, text]) => {
      const span = element("span", at > 0.96 && side === "left" ? { class: "last" } : {}, text);
      span.style[side] = `${100 * at}%`;
      return span;
    });
  }

  function drawChart(figure) {
    const chart = JSON.parse(figure.dataset.chart), { axis: wanted, scale: kind } = document.documentElement.dataset;
    const axis = wanted in chart.axes ? wanted : Object.keys(chart.axes)[0], xName = chart.axes[axis];
    const drawn = kinds[chart.kind](chart, axis, Boolean(chart.log) && kind === "log");
    figure.querySelector(".plot")?.remove();
    if (!drawn) return;
    const { axes, marks, tips, rows } = drawn, every = Math.ceil((rows?.length ?? 0) / 8);
    const left = rows ? rows.map((row, index) => [(index + 0.5) / rows.length, row]).filter((_, index) => index % every === 0)
      : axes.up.ticks(5).map(([at, text]) => [1 - at, text]);
    const grid = rows ? "" : left.map(([at]) => `M0 ${(at * HEIGHT).toFixed(1)}H${WIDTH}`).join("");
    const name = `${rows ? "" : tips.map((one) => one.name).join(", ")} by ${xName}`;
    const canvas = element("div", { class: "canvas", tabindex: "0", role: "group", "aria-label": "Values by arrow keys" }, picture(`0 0 ${WIDTH} ${HEIGHT}`, name, [["grid", grid], ...marks]));
    canvas.flatoutTip = { x: xName, isCounted: isCounted(axis), series: tips, rows: Boolean(rows) };
    const plot = element("div", { class: "plot" },
      element("div", { class: "y" }, ...labels(left, "top")), canvas,
      element("div", { class: "x" }, ...labels(axes.across.ticks(6), "left")), element("div", { class: "xname" }, xName));
    plot.style.setProperty("--gutter", `${Math.max(...left.map(([, text]) => text.length))}ch`);
    figure.append(plot);
  }

  // The samples of each micro-batch to scale, the batches in alternating colors; padding follows its sample.
  function bars(batches, widest, isPadded) {
    const gap = 8, unit = (WIDTH - gap * Math.max(0, batches.length - 1)) / widest, marks = [];
    let left = 0;
    function block(style, tokens) {
      const width = (tokens * unit).toFixed(2);
      marks.push([`block ${style}`, `M${left.toFixed(1)} 0h${width}v10h-${width}z`]);
      left += tokens * unit;
    }
    batches.forEach((batch, number) => {
      const longest = Math.max(...batch, 0);
      batch.forEach((length, index) => {
        block(`c${2 * (number % 2)}${index % 2 ? " alt" : ""}`, length);
        if (isPadded && length < longest) block("filler", longest - length);
      });
      left += gap;
    });
    return marks;
  }

  function drawLanes(holder) {
    const { packed, padded, widest } = JSON.parse(holder.dataset.lanes);
    const drawn = [["packed", "as it ran", packed], ...(padded.length ? [["padded", "with padding", padded]] : [])];
    holder.replaceChildren(...drawn.map(([style, label, batches]) => {
      const svg = picture(`0 0 ${WIDTH} 10`, label, bars(batches, widest, style === "padded"));
      svg.setAttribute("class", style);
      return svg;
    }));
  }

  // Draws all charts within an element, by the axis and the scale that the page's switches have.
  function draw(within) {
    within.querySelectorAll("[data-chart]").forEach(drawChart);
    within.querySelectorAll("[data-lanes]").forEach(drawLanes);
  }

  return { WIDTH, HEIGHT, niceTicks, tickLabel, xScale, yScale, kinds, bars, draw };
})();
if (typeof module === "object") module.exports = charts;
