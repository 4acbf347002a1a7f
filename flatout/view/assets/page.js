"use strict";
// All listeners are on the document, so that parts of the page can be replaced while it is open.
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
    const data = (canvas.flatoutTip ??= JSON.parse(canvas.dataset.tip));
    let found = data.series;
    if (data.rows) found = [found[Math.min(found.length - 1, Math.max(0, Math.floor(down * found.length)))]];
    let best = null;
    const points = found.map((one) => {
      const index = nearest(one.p, across * 1000);
      const far = Math.abs(one.p[index] - across * 1000);
      if (best === null || far < best.far) best = { far, place: one.p[index], x: one.x[index] };
      return { name: one.n, color: one.c, place: one.p[index], y: one.y[index] };
    });
    clear();
    if (!best) return;
    const cross = document.createElement("div"), tip = document.createElement("div");
    cross.className = "cross";
    cross.style.left = best.place / 10 + "%";
    tip.className = "tip";
    const head = document.createElement("b");
    head.textContent = data.x + " " + shown(best.x);
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
    const data = (canvas.flatoutTip ??= JSON.parse(canvas.dataset.tip)), places = data.series[0].p;
    const index = nearest(places, canvas.flatoutPlace ?? 500) + way;
    show(canvas, places[Math.min(places.length - 1, Math.max(0, index))] / 1000, 0);
  });

  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("button");
    if (!button) return;
    if (button.dataset.toggle === "theme") {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      remember("theme", root.dataset.theme);
    } else if (button.dataset.switch) {
      root.dataset[button.dataset.switch] = button.dataset.value;
      remember(button.dataset.switch, button.dataset.value);
    } else if (button.dataset.kind !== undefined) {
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
      for (const row of button.closest("section").querySelectorAll("tr[data-kind]")) {
        row.hidden = button.dataset.kind !== "" && row.dataset.kind !== button.dataset.kind;
      }
    }
    clear();
  });
})();
