(() => {
  "use strict";
  const root = document.body;
  const data = JSON.parse(document.getElementById("ktp-data").textContent);
  const all = (selector, from = root) => [...from.querySelectorAll(selector)];
  const one = (id) => document.getElementById(`ktp-${id}`);

  // -- light and dark -------------------------------------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  const button = one("theme");
  const say = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const toggle = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  };
  button.hidden = false;
  button.addEventListener("click", toggle);
  dark.addEventListener("change", say);
  say();

  // -- search, and the keyboard ---------------------------------------------

  const rows = all("details.row");
  const box = one("search");
  const search = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.text.includes(word));
    }
    for (const group of all(".group")) {
      group.hidden = all("details.row", group).every((row) => row.hidden);
    }
    const left = rows.filter((row) => !row.hidden).length;
    one("count").textContent = words.length ? `${left} of ${rows.length}` : "";
  };
  const move = (by) => {
    const shown = rows.filter((row) => !row.hidden);
    const at = shown.findIndex((row) => row.contains(document.activeElement));
    const first = by > 0 ? 0 : shown.length - 1;
    const next = at < 0 ? shown[first] : shown[at + by];
    if (next) {
      next.firstElementChild.focus();
      next.scrollIntoView({ block: "nearest" });
    }
  };
  if (box) {
    box.addEventListener("input", search);
    // A browser may keep the text when a page is loaded again.
    search();
  }
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) { return; }
    const isTyping = /INPUT|SELECT|TEXTAREA/.test(event.target.tagName);
    const inRow = event.target.closest && event.target.closest("details.row");
    const key = event.key;
    if (isTyping) {
      if (event.target !== box) { return; }
      if (key === "Escape") {
        box.value = "";
        search();
        box.blur();
      } else if (key === "ArrowDown" || key === "Enter") {
        move(1);
      } else {
        return;
      }
    } else if (key === "/" && box) {
      box.focus();
      box.select();
    } else if (key === "t") {
      toggle();
    } else if (key === "j" || (key === "ArrowDown" && inRow)) {
      move(1);
    } else if (key === "k" || (key === "ArrowUp" && inRow)) {
      move(-1);
    } else {
      return;
    }
    event.preventDefault();
  });

  // -- memory and communication of a step -----------------------------------

  if (!data.rows) { return; }
  // As Python rounds: a half to the even digit.
  const rounded = (size) => {
    const low = Math.floor(size * 100);
    const rest = size * 100 - low;
    const isUp = rest > 0.5 || (rest === 0.5 && low % 2 === 1);
    return ((low + isUp) / 100).toFixed(2);
  };
  const bytes = (size) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (size < 1024) {
        return unit === "B" ? `${size} B` : `${rounded(size)} ${unit}`;
      }
      size /= 1024;
    }
    return `${rounded(size)} GiB`;
  };
  const at = ([coefficient, batch, length, offset, added, parts, times], b, l) =>
    times * Math.floor(
      coefficient * (batch ? (b + added) ** batch : 1) *
      (length ? (l + offset) ** length : 1) / parts);
  const sum = (sizes, b, l) =>
    sizes.reduce((total, size) => total + at(size, b, l), 0);
  const draw = (svg, parts, whole) => {
    let x = 0;
    for (const rect of all("rect", svg)) {
      const width = 100 * (parts[rect.dataset.part] || 0) / (whole || 1);
      rect.setAttribute("x", `${x}%`);
      rect.setAttribute("width", `${width}%`);
      x += width;
    }
  };
  const inputs = ["batch", "length", "optimizer", "target"]
    .map((name) => [name, one(name)]).filter(([, input]) => input);
  const compute = () => {
    const step = Object.fromEntries(
      inputs.map(([name, input]) => [name, input.value]));
    const b = Math.floor((Number(step.batch) || 0) / data.replicas);
    const l = Number(step.length) || 0;
    const parts = {
      parameters: data.parameters,
      gradients: data.gradients,
      slots: data.gradients * data.slots[step.optimizer],
      activations: sum(data.activations, b, l),
      gathered: data.gathered,
    };
    const total = Object.values(parts).reduce((x, y) => x + y, 0);
    const target = data.targets[step.target];
    const whole = Math.max(total, target ? target.memory : 0);
    const memory = one("memory");
    const svg = memory.querySelector("svg");
    draw(svg, parts, whole);
    for (const [name, size] of Object.entries(parts)) {
      const value = memory.querySelector(`[data-value="${name}"]`);
      if (value) { value.textContent = bytes(size); }
    }
    const line = svg.querySelector("line");
    line.setAttribute("visibility", target ? "visible" : "hidden");
    const limit = `${target ? 100 * target.memory / (whole || 1) : 0}%`;
    line.setAttribute("x1", limit);
    line.setAttribute("x2", limit);
    one("total").textContent = bytes(total);
    const verdict = one("verdict");
    const fits = target && total <= target.memory;
    verdict.textContent = !target ? "on each device" :
      `${fits ? "of" : "does not fit in"} ${bytes(target.memory)} ` +
      `(${target.title})`;
    verdict.classList.toggle("over", Boolean(target) && !fits);
    const sent = data.rows.map((row) => Object.fromEntries(
      Object.entries(row).map(([kind, sizes]) => [kind, sum(sizes, b, l)])));
    const sums = sent.map((row) =>
      Object.values(row).reduce((x, y) => x + y, 0));
    const most = Math.max(...sums, 0);
    for (const element of all("[data-row]")) {
      const index = Number(element.dataset.row);
      draw(element.querySelector("svg"), sent[index], most);
      element.querySelector("[data-sum]").textContent = bytes(sums[index]);
    }
    const every = one("sent");
    if (every) { every.textContent = bytes(sums.reduce((x, y) => x + y, 0)); }
  };
  // The address keeps the step, so that a link shows it.
  const keep = () => {
    const text = inputs.map(([name, input]) =>
      `${name}=${encodeURIComponent(input.value)}`).join("&");
    try { history.replaceState(null, "", `#${text}`); } catch { /* a file */ }
  };
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    const found = inputs.find(([known]) => known === name);
    if (found) { found[1].value = value; }
  }
  for (const [, input] of inputs) {
    input.disabled = false;
    input.addEventListener("input", () => { compute(); keep(); });
  }
  compute();
})();
