"use strict";
// All listeners are on the document, so that parts of the page can be replaced while it is open. charts.js draws charts.
(() => {
  const root = document.documentElement;
  const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
  const small = new Intl.NumberFormat("en", { notation: "scientific", maximumSignificantDigits: 4 });

  const shown = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? small : number).format(value).replace("E", "e");

  function remember(name, value) {
    try { localStorage.setItem("flatout-" + name, value); } catch { /* some browsers store nothing for files */ }
  }
  try {
    for (const name of ["theme", "axis", "scale"]) {
      const value = localStorage.getItem("flatout-" + name);
      if (value) root.dataset[name] = value;
    }
  } catch { /* as above */ }
  if (!root.dataset.theme) root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

  function nearest(places, at) {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] < at) low = middle; else high = middle;
    }
    return at - places[low] < places[high] - at ? low : high;
  }

  function clear() {
    document.querySelectorAll(".cross, .tip").forEach((mark) => mark.remove());
  }

  // Shows the values at `across`, from 0 to 1; of the row at `down` in a heat strip.
  function show(canvas, across, down) {
    const data = canvas.flatoutTip;
    let found = data.series;
    if (data.rows) found = [found[Math.min(found.length - 1, Math.max(0, Math.floor(down * found.length)))]];
    let best = null;
    const points = found.map((one) => {
      const index = nearest(one.places, across * charts.WIDTH), place = one.places[index];
      const far = Math.abs(place - across * charts.WIDTH);
      if (best === null || far < best.far) best = { far, place, x: one.x[index] };
      return { name: one.name, color: one.color, place, y: one.y[index] };
    });
    clear();
    if (!best) return;
    const cross = document.createElement("div"), tip = document.createElement("div");
    cross.className = "cross";
    cross.style.left = best.place / 10 + "%";
    tip.className = "tip";
    tip.setAttribute("role", "status");
    const head = document.createElement("b");
    head.textContent = data.x + " " + shown(data.isCounted ? Math.round(best.x) : best.x);
    tip.append(head);
    for (const point of points) {
      if (point.y === null || Math.abs(point.place - best.place) > 25) continue;
      const line = document.createElement("div"), name = document.createElement("span"), mark = document.createElement("i");
      mark.className = point.color;
      name.append(mark, point.name);
      const value = document.createElement("span");
      value.textContent = shown(point.y);
      line.append(name, value);
      tip.append(line);
    }
    canvas.append(cross, tip);
    canvas.flatoutPlace = best.place;
    const room = canvas.clientWidth - tip.offsetWidth, left = (best.place / 1000) * canvas.clientWidth + 12;
    tip.style.left = Math.max(0, left > room ? left - 24 - tip.offsetWidth : left) + "px";
  }

  function follow(event) {
    const canvas = event.target.closest?.(".canvas");
    if (!canvas) return clear();
    const box = canvas.getBoundingClientRect();
    show(canvas, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  }
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("keydown", (event) => {
    const canvas = event.target.closest?.(".canvas");
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!canvas || !way) return;
    event.preventDefault();
    const { places } = canvas.flatoutTip.series[0];
    const index = nearest(places, canvas.flatoutPlace ?? 500) + way;
    show(canvas, places[Math.min(places.length - 1, Math.max(0, index))] / 1000, 0);
  });

  // What a cell stands for, to sort by: a time, a number with its unit, or its text.
  function worth(text) {
    const parts = /^(\d+):(\d+):(\d+)/.exec(text);
    if (parts) return parts[1] * 3600 + parts[2] * 60 + Number(parts[3]);
    const found = /^-?[\d,.]+/.exec(text), unit = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
    return found ? Number(found[0].replaceAll(",", "")) * (unit[text[found[0].length]] ?? 1) : text === "–" ? Infinity : text;
  }

  function sort(head) {
    const body = head.closest("table").tBodies[0], way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const rows = [...body.rows].map((row) => [worth(row.cells[head.cellIndex].textContent), row]);
    rows.sort(([a], [b]) => way * (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1));
    body.append(...rows.map(([, row]) => row));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
  }

  // Saves a table, or the points of the chart that is shown.
  function save(button) {
    const figure = button.closest("figure"), table = button.closest("section")?.querySelector("table");
    let rows = [];
    if (figure) {
      const data = figure.querySelector(".canvas").flatoutTip;
      rows = [["series", data.x, "value"], ...data.series.flatMap((one) => one.x.map((x, index) => [one.name, x, one.y[index] ?? ""]))];
    } else {
      rows = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    }
    // a text that begins like a formula stays a text in a spreadsheet
    const cell = (value) => `"${String(value).replace(/^([=+@]|-(?![\d.]))/, "'$1").replaceAll('"', '""')}"`;
    const lines = rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
    download(new Blob([lines], { type: "text/csv" }), button.dataset.csv, ".csv");
  }

  function download(blob, title, ending) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = (title || "chart").replace(/[^\w-]+/g, "-").toLowerCase() + ending;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // Draws a chart as it is shown, at twice its size: the marks of its SVG, and the texts and colors of its labels.
  // A picture of the HTML itself would be blocked by some browsers.
  function drawn(figure) {
    const box = figure.getBoundingClientRect(), canvas = document.createElement("canvas"), pen = canvas.getContext("2d");
    [canvas.width, canvas.height] = [Math.ceil(2 * box.width), Math.ceil(2 * box.height)];
    pen.setTransform(2, 0, 0, 2, -2 * box.x, -2 * box.y);
    pen.fillStyle = getComputedStyle(figure).backgroundColor;
    pen.fillRect(box.x, box.y, box.width, box.height);
    for (const svg of figure.querySelectorAll(".plot svg")) {
      if (!svg.checkVisibility()) continue;
      const { x, y, width, height } = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
      for (const mark of svg.querySelectorAll("path")) {
        const style = getComputedStyle(mark), shape = new Path2D();
        shape.addPath(new Path2D(mark.getAttribute("d")), new DOMMatrix([width / view.width, 0, 0, height / view.height, x, y]));
        pen.globalAlpha = Number(style.opacity) * Number(style.fillOpacity);
        pen.fillStyle = style.fill;
        if (style.fill !== "none") pen.fill(shape);
        pen.globalAlpha = Number(style.opacity);
        pen.lineWidth = parseFloat(style.strokeWidth);
        [pen.strokeStyle, pen.lineCap, pen.lineJoin] = [style.stroke, style.strokeLinecap, style.strokeLinejoin];
        pen.setLineDash(style.strokeDasharray === "none" ? [] : style.strokeDasharray.split(",").map(parseFloat));
        if (style.stroke !== "none") pen.stroke(shape);
      }
    }
    pen.globalAlpha = 1;
    for (const swatch of figure.querySelectorAll(".legend i")) {
      const { x, y, width, height } = swatch.getBoundingClientRect();
      pen.fillStyle = getComputedStyle(swatch).backgroundColor;
      pen.fillRect(x, y, width, height);
    }
    pen.textBaseline = "middle";
    const texts = document.createTreeWalker(figure, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const node = texts.currentNode, holder = node.parentElement, range = document.createRange();
      if (!node.data.trim() || holder.closest("button, .tip") || !holder.checkVisibility()) continue;
      range.selectNodeContents(node);
      const { x, y, height } = range.getBoundingClientRect(), style = getComputedStyle(holder);
      pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
      pen.fillStyle = style.color;
      pen.fillText(node.data.trim(), x, y + height / 2);
    }
    return canvas;
  }

  // Copies a text and says so; where a browser forbids it, the text is selected for the person to copy.
  async function copy(button) {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.textContent = "Copied";
    } catch {
      const code = button.parentElement.querySelector("code, b");
      if (code) getSelection().selectAllChildren(code);
      button.textContent = "Press Ctrl-C";
    }
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  // What people cannot see from classes and scroll bars: which switch is on, and that a box scrolls by the arrow keys.
  function tell() {
    for (const button of document.querySelectorAll("[data-switch]")) {
      button.setAttribute("aria-pressed", String(root.dataset[button.dataset.switch] === button.dataset.value));
    }
    for (const box of document.querySelectorAll("pre, .scroll")) {
      const scrolls = box.scrollHeight > box.clientHeight || box.scrollWidth > box.clientWidth;
      if (scrolls) box.tabIndex = 0; else box.removeAttribute("tabindex");
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button");
    if (!button) return;
    if (button.dataset.toggle === "theme") {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      remember("theme", root.dataset.theme);
    } else if (button.dataset.sort !== undefined) {
      sort(button.closest("th"));
    } else if (button.dataset.copy) {
      copy(button);
    } else if (button.dataset.csv) {
      save(button);
    } else if (button.dataset.png) {
      drawn(button.closest("figure")).toBlob((blob) => download(blob, button.dataset.png, ".png"));
    } else if (button.dataset.switch) {
      root.dataset[button.dataset.switch] = button.dataset.value;
      remember(button.dataset.switch, button.dataset.value);
      charts.draw(document);
      tell();
    } else if (button.dataset.kind !== undefined) {
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      for (const row of button.closest("section").querySelectorAll("tr[data-kind]")) {
        row.hidden = button.dataset.kind !== "" && row.dataset.kind !== button.dataset.kind;
      }
    }
    clear();
  });

  // what is there, and what a page puts there later
  charts.draw(document);
  tell();
  addEventListener("resize", tell);
  document.addEventListener("toggle", tell, true);
  new MutationObserver((changes) => {
    const added = changes.flatMap((change) => [...change.addedNodes]).filter((one) => one.querySelector && !one.closest("[data-chart], [data-lanes]"));
    for (const parent of new Set(added.map((one) => one.parentElement ?? one))) charts.draw(parent);
    tell();
  }).observe(document.body, { childList: true, subtree: true });
})();
