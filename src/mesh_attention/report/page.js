"use strict";
(() => {
  const root = document.documentElement;
  const variants = JSON.parse(document.getElementById("variants").textContent);
  const pictures = [...document.querySelectorAll("[data-picture]")];
  const darkSystem = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 40rem)");
  const touch = matchMedia("(pointer: coarse)");

  // Colours of text and grids are those of the page, so that they follow light and dark.
  function themed(layout) {
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = (plain) => ({
      ...plain,
      gridcolor: colour("--grid"),
      linecolor: colour("--line"),
      zerolinecolor: colour("--line"),
      fixedrange: touch.matches,
    });
    const columns = phone.matches && layout.legend?.entrywidth ? { entrywidth: 0.45 } : {};
    return {
      ...layout,
      legend: { ...layout.legend, ...columns },
      xaxis: axis(layout.xaxis),
      yaxis: axis(layout.yaxis),
      autosize: true,
      margin: { l: 8, r: 8, t: 24, b: 8 },
      dragmode: touch.matches ? false : "zoom",
      font: { family: "system-ui, sans-serif", size: phone.matches ? 11 : 13, color: colour("--text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { align: "left" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--accent") },
    };
  }

  function chosen(section) {
    const values = [];
    for (const control of section.querySelectorAll("[data-control]")) {
      if (control.type !== "radio" || control.checked) values[control.dataset.control] = control.value;
    }
    return values.join("|");
  }

  function draw(section) {
    const variant = variants[section.dataset.picture][chosen(section)];
    section.querySelector("figcaption").textContent = variant.caption;
    return Plotly.react(section.querySelector(".plot"), variant.data, themed(variant.layout), {
      displaylogo: false,
      responsive: true,
      displayModeBar: touch.matches ? false : "hover",
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  }

  function drawAll() {
    pictures.forEach(draw);
  }

  // Light, dark, or as the system has it until someone chooses.
  const button = document.getElementById("theme");
  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : darkSystem.matches;
  }
  function tellTheme() {
    button.textContent = isDark() ? "light colours" : "dark colours";
    button.setAttribute("aria-pressed", String(isDark()));
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    tellTheme();
    drawAll();
  });
  darkSystem.addEventListener("change", () => {
    tellTheme();
    drawAll();
  });
  phone.addEventListener("change", drawAll);

  for (const section of pictures) {
    section.addEventListener("change", () => draw(section));
  }

  // The browser may refuse the clipboard to a file; then the text is selected, to be copied by hand.
  for (const copy of document.querySelectorAll(".copy")) {
    copy.addEventListener("click", async () => {
      const code = copy.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        copy.textContent = "selected";
      }
    });
  }

  // Numbers by value, words by alphabet; a second click turns the order round.
  const body = document.querySelector("#methods tbody");
  const heads = [...document.querySelectorAll("#methods thead th")];
  function sortBy(column) {
    const head = heads[column];
    const down = head.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.value;
    const numbers = [...body.rows].every((row) => key(row) !== "" && !isNaN(key(row)));
    const order = (a, b) => (numbers ? key(a) - key(b) : key(a).localeCompare(key(b)));
    const rows = [...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
    body.append(...rows);
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  }
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sortBy(column));
  });

  tellTheme();
  drawAll();
  root.dataset.ready = "yes";
})();
