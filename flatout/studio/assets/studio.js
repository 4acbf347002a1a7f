"use strict";
// The scripts of all pages of studio; each page names its own in <body data-page>.
(() => {
  const byId = (id) => document.getElementById(id);
  const count = new Intl.NumberFormat("en");
  const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

  function show(element, text) {
    element.textContent = text;
    element.hidden = !text;
  }

  // Sends a request; throws an Error with the sentence of the answer if it is refused.
  async function ask(path, body) {
    let answer;
    const options = body === undefined ? {} : { method: "POST", body: body instanceof Blob ? body : JSON.stringify(body) };
    try {
      answer = await fetch(path, options);
      byId("gone").hidden = true;
    } catch (error) {
      byId("gone").hidden = false;
      throw new Error("no answer from flatout studio");
    }
    if (answer.ok) return answer;
    const text = await answer.text();
    let sentence = text;
    try { sentence = JSON.parse(text).error; } catch { /* plain text */ }
    throw new Error(sentence);
  }

  // Calls onLine for each line of a job, and returns its result.
  async function follow(answer, onLine) {
    if (!answer.body) return null;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", result = null;
    for (;;) {
      let piece;
      try { piece = await reader.read(); } catch { throw new Error("no answer from flatout studio"); }
      if (piece.done) return result;
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const text of lines) {
        const line = JSON.parse(text);
        if (line.error) throw new Error(line.error);
        if (line.result !== undefined) result = line.result;
        onLine(line);
      }
    }
  }

  function duration(seconds) {
    const minutes = Math.floor(seconds / 60);
    return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : minutes ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.round(seconds)} s`;
  }

  // A status line that shows the last message and the seconds since the start.
  function statusOf(element) {
    let message = "", elapsed = "";
    const draw = () => { element.textContent = [message, elapsed].filter(Boolean).join(" · "); };
    return (line) => {
      if (line.log) message = line.log;
      if (line.progress) message = `tokenized ${count.format(line.progress[0])}${line.progress[1] ? " of " + count.format(line.progress[1]) : ""} rows`;
      if (line.elapsed_s) elapsed = `${line.elapsed_s} s`;
      draw();
    };
  }

  // A text with a button that copies it.
  function copied(text) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "csv", textContent: "Copy" });
    button.dataset.copy = text;
    button.setAttribute("aria-label", "Copy " + text);
    const holder = Object.assign(document.createElement("span"), { className: "copied" });
    holder.append(Object.assign(document.createElement("code"), { textContent: text }), " ", button);
    return [holder, " "];
  }

  // A small line of a figure, without axes.
  function spark(values, label) {
    const low = Math.min(...values), room = Math.max(...values) - low || 1, space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path");
    const facts = { viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label, class: "spark c0" };
    for (const [name, value] of Object.entries(facts)) svg.setAttribute(name, value);
    path.setAttribute("class", "line");
    path.setAttribute("d", "M" + values.map((one, index) => `${(100 * index) / (values.length - 1)},${22 - (20 * (one - low)) / room}`).join(" "));
    svg.append(path);
    return svg;
  }

  // Settings of a form that differ from their defaults, by dotted name.
  function settingsOf(form) {
    const found = {};
    for (const field of form.querySelectorAll("[data-setting]:not([hidden]) [name]")) {
      const value = field.value.trim();
      if (value !== "" && value !== field.dataset.default) found[field.name] = value;
    }
    return found;
  }
  const overridesOf = () => byId("overrides").value.split("\n").filter((line) => line.trim());

  const pages = {
    data() {
      const form = byId("build"), error = byId("build-error"), log = byId("build-log"), bar = byId("build-progress");
      const button = form.querySelector("[type=submit]"), name = form.elements["data.name"];

      function nameAfter(path) {
        const stem = path.split("/").pop().split(".")[0].replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[._-]+/, "");
        if (!name.dataset.typed) name.value = stem;
      }
      name.addEventListener("input", () => { name.dataset.typed = "yes"; });
      // Offers the file's columns if no format has them; an answer that comes after another choice is dropped.
      let looked = "";
      async function lookAt(path) {
        looked = path;
        nameAfter(path);
        byId("columns").hidden = true;
        try {
          const seen = await follow(await ask("/api/columns", { source: path }), () => {});
          if (looked !== path || !seen.problem) return;
          for (const choice of document.querySelectorAll("[data-column]")) {
            choice.replaceChildren(new Option("none", ""));
            for (const [own, text] of Object.entries(seen.found)) choice.add(new Option(`${own}: ${text}`, own));
            choice.value = seen.columns[choice.dataset.column] ?? "";
          }
          byId("columns-note").textContent = seen.problem + (Object.keys(seen.columns).length ? ". This is our guess; change it where it is wrong." : ". Say which of them the model reads and answers.");
          byId("columns").hidden = false;
        } catch (problem) { if (looked === path) show(error, problem.message); }
      }
      const columnsOf = () => byId("columns").hidden ? {} : Object.fromEntries([...document.querySelectorAll("[data-column]")].filter((one) => one.value).map((one) => [one.dataset.column, one.value]));
      form.addEventListener("change", (event) => { if (event.target.name === "source") lookAt(event.target.value); });
      const chosen = form.querySelector("[name=source]:checked");
      if (chosen) lookAt(chosen.value);
      const models = byId("models").options;
      if (models.length === 1) form.elements["model.name"].value = models[0].value;

      async function upload(files) {
        const status = byId("upload-status"), [file] = files, limit = Number(byId("upload").dataset.maxBytes);
        if (!file) return;
        if (file.size > limit) {
          status.textContent = `${file.name} is larger than ${limit / 2 ** 30} GiB; copy it into the workspace instead`;
          return;
        }
        status.textContent = `uploading ${file.name}`;
        try {
          const { path } = await (await ask("/api/upload?name=" + encodeURIComponent(file.name), file)).json();
          const label = document.createElement("label"), radio = document.createElement("input"), text = document.createElement("span");
          Object.assign(radio, { type: "radio", name: "source", value: path, checked: true });
          text.textContent = path;
          label.append(radio, text);
          byId("files").querySelector(".empty")?.remove();
          byId("files").prepend(label);
          status.textContent = `uploaded ${path}` + (files.length > 1 ? `; only the first of ${files.length} files was taken` : "");
          lookAt(path);
        } catch (problem) {
          status.textContent = problem.message;
        }
      }
      byId("upload").addEventListener("change", (event) => upload(event.target.files));
      const drop = byId("drop");
      for (const kind of ["dragover", "dragleave", "drop"]) {
        drop.addEventListener(kind, (event) => {
          event.preventDefault();
          drop.classList.toggle("over", kind === "dragover");
          if (kind === "drop") upload(event.dataTransfer.files);
        });
      }

      async function followBuild(answer) {
        const status = statusOf(byId("build-status"));
        button.disabled = true;
        byId("cancel").hidden = false;
        try {
          const built = await follow(answer, (line) => {
            status(line);
            if (line.log) log.append(Object.assign(document.createElement("li"), { textContent: line.log }));
            if (line.progress) {
              bar.hidden = false;
              if (line.progress[1]) { bar.max = line.progress[1]; bar.value = line.progress[0]; }
            }
          });
          if (!built) return;
          const page = "/data?name=" + encodeURIComponent(built), isOpen = page === location.pathname + location.search;
          location.href = page + "#samples";
          if (isOpen) location.reload();  // only the fragment changed, but the data set was replaced
        } finally {
          button.disabled = false;
          byId("cancel").hidden = bar.hidden = true;
          byId("build-status").textContent = "";
        }
      }
      form.addEventListener("submit", async (event) => {
        event.preventDefault();
        log.textContent = "";
        show(error, "");
        const source = form.elements.source?.value;
        if (!source) return show(error, "Choose a file, or upload one.");
        try {
          const body = { source, format: form.elements.format.value, columns: columnsOf(), replaces: byId("replaces").checked, settings: settingsOf(form), overrides: overridesOf() };
          delete body.settings.format;
          await followBuild(await ask("/api/build", body));
        } catch (problem) { show(error, problem.message); }
      });
      byId("cancel").addEventListener("click", () => ask("/api/cancel", {}));
      ask("/api/build").then((answer) => answer.headers.get("content-type")?.includes("ndjson") && followBuild(answer))
        .catch((problem) => show(error, problem.message));

      const samples = byId("samples");
      if (!samples) return;
      let first = 0;
      const size = Number(samples.dataset.perPage), movers = samples.querySelectorAll("[data-move]");
      async function load() {
        const status = statusOf(byId("samples-status"));
        movers.forEach((mover) => { mover.disabled = true; });
        try {
          const found = await follow(await ask("/api/samples", { name: samples.dataset.name, first }), status);
          // HTML from the server, which escapes every text
          byId("samples-body").innerHTML = found.samples;
          if (found.overview) byId("overview").innerHTML = found.overview;
          if (found.statistics) byId("statistics").innerHTML = found.statistics;
          byId("samples-status").textContent = `${first + 1} to ${Math.min(first + size, found.num_samples)} of ${count.format(found.num_samples)}`;
          movers[0].disabled = first === 0;
          movers[1].disabled = first + size >= found.num_samples;
        } catch (problem) { byId("samples-status").textContent = problem.message; }
      }
      movers.forEach((mover) => mover.addEventListener("click", () => { first += size * Number(mover.dataset.move); load(); }));
      load();
    },

    plan() {
      const form = byId("settings"), status = byId("plan-status"), error = byId("plan-error"), query = new URLSearchParams(location.search);
      const model = form.elements["model.name"], data = form.elements["data.name"];
      if (query.get("data")) data.value = query.get("data");
      const tokenizer = () => data.selectedOptions[0]?.dataset.tokenizer ?? "";
      model.value = query.get("model") ?? tokenizer();
      data.addEventListener("change", () => { model.value = tokenizer(); });

      // Sets fields of the form, the others to their defaults; what has none becomes a line below them.
      function take(settings) {
        const lines = [];
        for (const field of form.querySelectorAll("[data-setting] [name]")) {
          if (field !== data) field.value = field.dataset.default ?? "";
        }
        for (const [name, value] of Object.entries(settings)) {
          const field = form.elements[name];
          const isOther = field?.tagName === "SELECT" && ![...field.options].some((one) => one.value === value);
          if (!field || isOther) lines.push(`${name}=${value}`); else field.value = value;
        }
        byId("overrides").value = lines.join("\n");
        later();
      }
      for (const button of form.querySelectorAll("[data-preset]")) {
        button.addEventListener("click", () => {
          const preset = JSON.parse(button.dataset.preset);
          for (const [name, value] of Object.entries(preset)) form.elements[name].value = value;
          later();
        });
      }
      async function takeFrom(folder) {
        const told = byId("presets-status");
        try {
          take(await (await ask("/api/settings?folder=" + encodeURIComponent(folder))).json());
          told.textContent = `settings of ${folder}`;
        } catch (problem) { told.textContent = problem.message; }
      }
      byId("earlier").addEventListener("change", (event) => event.target.value && takeFrom(event.target.value));
      // The first of the presets, then with fewer tokens, whose plan is not refused.
      byId("fits").addEventListener("click", async () => {
        const told = byId("presets-status"), tries = [["LoRA", 0], ["QLoRA", 0], ["QLoRA", 1024], ["QLoRA", 512]];
        let why = "";
        for (const [name, tokens] of tries) {
          const button = [...form.querySelectorAll("[data-preset]")].find((one) => one.textContent === name);
          const preset = JSON.parse(button.dataset.preset), settings = { ...settingsOf(form), ...preset };
          const lines = overridesOf().filter((line) => !tokens || !line.startsWith("data.max_tokens="));
          if (tokens) lines.push("data.max_tokens=" + tokens);
          const words = name + (tokens ? ` with samples of at most ${count.format(tokens)} tokens` : "");
          told.textContent = `trying ${words}`;
          try {
            const plan = await follow(await ask("/api/plan", { settings, overrides: lines, device: byId("device").value }), () => {});
            if (plan.rows[0][0] === "does not fit") throw new Error(plan.rows[0][1]);
            for (const [field, value] of Object.entries(preset)) form.elements[field].value = value;
            byId("overrides").value = lines.join("\n");
            told.textContent = `${words} fits`;
            return later();
          } catch (problem) { why = problem.message; }
        }
        told.textContent = "no preset fits: " + why;
      });

      function adaptToMethod() {
        const full = form.elements.method.value === "full";
        for (const field of form.querySelectorAll('[data-setting^="lora."], [data-setting^="base."]')) field.hidden = full;
      }

      const size = (bytes) => bytes >= 0.01 * 2 ** 30 ? (bytes / 2 ** 30).toFixed(2) + " GiB" : (bytes / 2 ** 20).toFixed(2) + " MiB";
      function draw(plan) {
        const figure = (name, text) => { document.querySelector(`[data-figure="${name}"]`).textContent = text; };
        const parts = Object.entries(plan.memory_parts).filter(([, bytes]) => bytes > 0);
        const total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
        figure("memory", total ? size(total) : "not planned");
        figure("time", plan.time_s === null ? "known after a run" : duration(plan.time_s));
        figure("steps", count.format(plan.num_steps));
        figure("tokens", (plan.num_tokens < 1e6 ? count : short).format(plan.num_tokens));
        figure("padding", (plan.padding_avoided * 100).toFixed(1) + "%");
        const key = byId("memory-key"), memory = byId("memory-bar");
        key.textContent = memory.textContent = "";
        parts.forEach(([name, bytes], index) => {
          const part = document.createElement("i"), entry = document.createElement("li"), value = document.createElement("b");
          part.className = entry.className = "c" + index;
          part.style.width = (100 * bytes) / total + "%";
          value.textContent = size(bytes);
          entry.append(document.createElement("i"), name + " ", value);
          memory.append(part);
          key.append(entry);
        });
        const rows = byId("plan-rows");
        rows.textContent = "";
        const speed = plan.measured_in ? [["speed", `as measured in ${plan.measured_in}`]] : [];
        for (const [name, text] of [...plan.rows, ...speed]) {
          rows.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: text }));
        }
        for (const field of form.querySelectorAll("input[name]")) {
          const value = field.name.split(".").reduce((part, name) => part?.[name], plan.settings);
          if (field.value === "" && value !== undefined) field.placeholder = value === null ? "not set" : String(value);
        }
        byId("figures").hidden = false;
      }

      // One request at a time; a change meanwhile asks again with the newest settings.
      let isPlanning = false, isStale = false, timer = 0;
      async function plan() {
        if (isPlanning) { isStale = true; return; }
        if (!model.value.trim() || !data.value) return;
        isPlanning = true;
        byId("plan").classList.add("stale");
        const step = statusOf(status);
        step({ log: "planning" });
        try {
          const body = { settings: settingsOf(form), overrides: overridesOf(), device: byId("device").value };
          draw(await follow(await ask("/api/plan", body), step));
          show(error, "");
          status.textContent = "up to date";
          byId("plan").classList.remove("stale", "refused");
        } catch (problem) {
          show(error, problem.message);
          status.textContent = "";
          byId("plan").classList.add("refused");
        } finally { isPlanning = false; }
        if (isStale) { isStale = false; plan(); }
      }
      function later() {
        adaptToMethod();
        status.textContent = "waiting for more changes";
        clearTimeout(timer);
        timer = setTimeout(plan, 400);
      }
      form.addEventListener("input", later);
      form.addEventListener("submit", (event) => event.preventDefault());
      byId("device").addEventListener("change", () => {
        byId("fits-where").textContent = byId("device").selectedOptions[0].textContent;
        later();
      });
      for (const button of form.querySelectorAll("[data-add]")) {
        button.addEventListener("click", () => {
          const field = byId("overrides");
          field.value += (field.value && !field.value.endsWith("\n") ? "\n" : "") + button.dataset.add + "=";
          field.focus();
        });
      }
      byId("start").addEventListener("submit", async (event) => {
        event.preventDefault();
        show(byId("start-error"), "");
        try {
          const body = { settings: { ...settingsOf(form), name: byId("name").value.trim() }, overrides: overridesOf() };
          const { folder } = await (await ask("/api/train", body)).json();
          location.href = "/run?folder=" + encodeURIComponent(folder);
        } catch (problem) { show(byId("start-error"), problem.message); }
      });
      adaptToMethod();
      if (query.get("from")) takeFrom(query.get("from")); else plan();
    },

    runs() {
      const form = byId("runs");
      if (!form) return;
      for (const time of form.querySelectorAll("time")) {
        time.textContent = new Date(1000 * Number(time.dataset.time)).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
      }
      const rows = [...form.querySelectorAll("tr[data-folder]")];
      byId("filter").addEventListener("input", () => {
        const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
        for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
        const found = rows.filter((row) => !row.hidden).length;
        byId("filter-status").textContent = !words.length ? "" : found ? `${found} of ${rows.length} runs` : "no run has all of these words; delete some of them";
      });
      // one run after the other, as a long one takes a while to read; runs that train are read again
      async function read(row) {
        try {
          const run = await (await ask("/api/figures?folder=" + encodeURIComponent(row.dataset.folder))).json();
          const figure = row.querySelector(".figure"), kind = document.createElement("small");
          kind.textContent = run.name;
          figure.replaceChildren(...(run.curve.length > 1 ? [spark(run.curve, `${run.name} from ${run.first} to ${run.last}`)] : []), run.last, kind);
          row.querySelector(".taken").textContent = run.steps;
          row.querySelector(".took").textContent = run.time;
        } catch { /* the run's page says why */ }
      }
      async function readAll(some) {
        for (const row of some) await read(row);
        const training = rows.filter((row) => row.dataset.state === "running");
        if (training.length) setTimeout(() => readAll(training), 3000);
      }
      readAll(rows);
      form.addEventListener("change", () => {
        form.querySelector("[type=submit]").disabled = form.querySelectorAll("[name=run]:checked").length < 2;
      });
      form.dispatchEvent(new Event("change"));
    },

    run() {
      const folder = byId("run").dataset.folder, error = byId("run-error"), live = byId("live"), box = byId("output-box");
      let version = 0, state = "", asked = "", started = Date.now(), isFolded = false;
      async function poll() {
        try {
          const answer = await (await ask(`/api/run?folder=${encodeURIComponent(folder)}&version=${version}`)).json();
          if (answer.state !== state) started = Date.now();
          if (asked !== "stop" || answer.state !== "running") asked = "";
          state = answer.state;
          byId("state").textContent = state;
          byId("state").className = "badge " + state;
          const output = byId("output"), atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
          output.textContent = answer.output || "waiting for the first line";
          if (atEnd) output.scrollTop = output.scrollHeight;
          if (answer.html !== undefined) {
            const folds = [...live.querySelectorAll("details")].map((fold) => fold.open), scroll = scrollY;
            live.innerHTML = answer.html;  // from the server, which escapes every text
            live.querySelectorAll("details").forEach((fold, index) => { if (folds[index]) fold.open = true; });
            scrollTo({ top: scroll, behavior: "instant" });
            if (!isFolded && live.querySelector(".chart")) {
              box.open = state === "failed";
              isFolded = true;
            }
            version = answer.version;
          }
          const seconds = Math.round((Date.now() - started) / 1000);
          const where = answer.step ? `step ${count.format(answer.step)} of ${count.format(answer.num_steps)}` : "starting";
          const left = answer.eta_s ? `about ${duration(answer.eta_s)} left` : "";
          const words = [asked === "stop" ? "saving" : where, left, `watched for ${duration(seconds)}`];
          byId("run-status").textContent = state === "running" ? words.filter(Boolean).join(" · ") : "";
          const bar = byId("run-progress");
          bar.hidden = state !== "running" || !answer.step;
          bar.max = answer.num_steps ?? 1;
          bar.value = answer.step ?? 0;
        } catch (problem) { show(error, problem.message); }
        byId("stop").hidden = state !== "running";
        byId("stop").disabled = asked === "stop";
        byId("resume").hidden = !["stopped", "failed", "interrupted"].includes(state);
        byId("take-away").hidden = state !== "complete";
        byId("talk").hidden = !["complete", "stopped", "interrupted"].includes(state);
        byId("delete").hidden = byId("rename").hidden = state === "running";
        setTimeout(poll, state === "running" ? 1000 : 3000);
      }
      for (const action of ["stop", "resume"]) {
        byId(action).addEventListener("click", async () => {
          show(error, "");
          try { await ask("/api/" + action, { folder }); asked = action; } catch (problem) { show(error, problem.message); }
        });
      }
      byId("delete").addEventListener("click", async () => {
        show(error, "");
        try {
          const { others } = await (await ask("/api/delete", { folder })).json();  // only says what is there
          const listed = [...others.slice(0, 20), ...(others.length > 20 ? [`and ${count.format(others.length - 20)} more`] : [])];
          const also = others.length ? ` Also in it, and written by no run:\n\n${listed.join("\n")}` : "";
          if (!confirm(`Move ${folder} with its checkpoints and results to the folder .trash of the workspace?${also}`)) return;
          await ask("/api/delete", { folder, others });
          location.href = "/runs";
        } catch (problem) { show(error, problem.message); }
      });
      byId("rename").addEventListener("click", async () => {
        const name = prompt(`A new name for ${folder}, and for its folder:`, folder.split("/").pop());
        if (name === null || name === folder.split("/").pop()) return;
        show(error, "");
        try {
          const renamed = await (await ask("/api/rename", { folder, name: name.trim() })).json();
          location.href = "/run?folder=" + encodeURIComponent(renamed.folder);
        } catch (problem) { show(error, problem.message); }
      });
      byId("notes").addEventListener("submit", async (event) => {
        event.preventDefault();
        show(error, "");
        const told = byId("notes-status");
        told.textContent = "";
        try {
          const saved = await (await ask("/api/notes", { folder, note: byId("note").value, tags: byId("tags").value })).json();
          byId("tags").value = saved.tags.join(" ");
          told.textContent = "saved";
        } catch (problem) { show(error, problem.message); }
      });
      byId("to").addEventListener("change", () => { byId("repo-field").hidden = byId("to").value !== "push"; });
      byId("take-away").addEventListener("submit", async (event) => {
        event.preventDefault();
        show(error, "");
        const to = byId("to").value, told = byId("take-away-status");
        try {
          const body = to === "push" ? { folder, repo: byId("repo").value.trim() } : { folder, to };
          const written = await follow(await ask(to === "push" ? "/api/push" : "/api/out", body), statusOf(told));
          told.textContent = "written: ";
          told.append(...[written.path, written.command].filter(Boolean).flatMap((text) => copied(text)));
        } catch (problem) { show(error, problem.message); told.textContent = ""; }
      });
      poll();
    },

    chat() {
      const form = byId("chat"), list = byId("turns"), error = byId("chat-error"), prompt = byId("prompt");
      if (!form) return;
      let turns = [];
      const send = form.querySelector("[type=submit]");
      const clear = () => {
        turns = [];
        list.textContent = "";
        byId("chat-status").textContent = send.disabled ? "the last answer is still being written; you can send when it ends" : "";
        show(error, "");
      };
      byId("clear").addEventListener("click", clear);
      byId("run-choice").addEventListener("change", clear);
      prompt.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
      });

      function addTurn(text) {
        const turn = document.createElement("li"), asked = document.createElement("p"), sides = {};
        asked.className = "asked said";
        asked.textContent = text;
        turn.append(asked);
        for (const side of ["run", "base"]) {
          sides[side] = Object.assign(document.createElement("p"), { className: "side said " + side });
          turn.append(sides[side]);
        }
        list.append(turn);
        return { turn, sides };
      }
      form.addEventListener("submit", async (event) => {
        event.preventDefault();
        const text = prompt.value.trim();
        if (!text || send.disabled) return;
        show(error, "");
        show(byId("chat-note"), "");
        send.disabled = true;
        // a new chat replaces `turns`: an answer that comes later belongs to the old one
        const mine = turns, { turn, sides } = addTurn(text), status = statusOf(byId("chat-status"));
        prompt.value = "";
        try {
          const heat = byId("temperature").value;
          const body = { run: byId("run-choice").value, turns: mine, prompt: text, system: byId("system").value.trim(), max_new_tokens: Number(byId("max-tokens").value), temperature: heat === "" ? null : Number(heat) };
          const answers = await follow(await ask("/api/chat", body), (line) => {
            if (mine !== turns) return;
            if (line.note) show(byId("chat-note"), line.note);
            if (line.piece) sides[line.side].textContent += line.piece;
            status(line.piece ? { log: line.side === "run" ? "the run answers" : "its base model answers" } : line);
          });
          for (const side of ["run", "base"]) {
            const said = answers[side] ?? (byId("run-choice").selectedOptions[0].dataset.alone ? "This is a model alone." : "This run started from random weights, so there is no base model.");
            sides[side].textContent = said || "(an empty answer)";
            sides[side].classList.toggle("nothing", !answers[side]);
          }
          turn.className = "answered";
          mine.push({ prompt: text, ...answers });
        } catch (problem) {
          if (mine !== turns) return;
          turn.remove();
          prompt.value = text;
          show(error, problem.message);
        } finally {
          send.disabled = false;
          byId("chat-status").textContent = "";
          if (mine === turns) prompt.focus();
        }
      });
    },
  };
  pages[document.body.dataset.page]?.();
})();
