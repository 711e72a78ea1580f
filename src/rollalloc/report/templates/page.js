"use strict";
// Unpacks the figures and texts of the page and shows them. Whatever comes from a run is set as text, never as HTML.
(async () => {
  const root = document.documentElement;
  const $ = (selector, within = document) => within.querySelector(selector);
  const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

  const unpacked = async (id) => {
    const packed = Uint8Array.from(atob($(id).textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const element = (name, { text, ...attributes } = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    made.append(...children);
    return made;
  };

  // What a reader typed or opened survives the reload of `--follow`.
  const memory = {
    get: (key) => { try { return sessionStorage.getItem(location.pathname + key); } catch { return null; } },
    set: (key, value) => { try { sessionStorage.setItem(location.pathname + key, value); } catch { /* not allowed */ } },
  };

  const data = JSON.parse(await unpacked("#data"));
  for (const place of $$(".completions")) completions(place, data.completions[place.dataset.section]);
  for (const figure of $$("figure[data-chart]")) tabulate(figure, data.charts[figure.dataset.chart]);
  const script = element("script");
  script.textContent = await unpacked("#library");
  document.head.append(script);
  const redraw = (which) => which.forEach((figure) => draw(figure, data.charts[figure.dataset.chart]));
  // What is near the window is drawn first, the rest while the browser has nothing else to do: a page may have many figures,
  // and a screenshot of the whole page or a reader who jumps to its end scrolls past none of them.
  const undrawn = () => $$("figure[data-chart]:not([data-drawn])");
  const near = new IntersectionObserver((seen) => redraw(seen.filter((entry) => entry.isIntersecting && !entry.target.dataset.drawn)
    .map((entry) => entry.target)), { rootMargin: "800px" });
  undrawn().forEach((figure) => near.observe(figure));
  const whenIdle = window.requestIdleCallback ?? ((next) => setTimeout(next, 100));  // Safari has none
  const drawRest = () => { redraw(undrawn().slice(0, 1)); if (undrawn().length) whenIdle(drawRest); };
  whenIdle(drawRest);
  // On paper, every figure is drawn, in the light theme.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = () => $$("figure[data-drawn]");
  addEventListener("beforeprint", () => { root.dataset.print = "yes"; redraw(dark.matches ? $$("figure[data-chart]") : undrawn()); });
  addEventListener("afterprint", () => { delete root.dataset.print; if (dark.matches) redraw(drawn()); });
  dark.addEventListener("change", () => redraw(drawn()));
  const scrolled = memory.get("scroll");
  if (scrolled) scrollTo(0, Number(scrolled));
  memory.set("scroll", "");
  root.dataset.ready = "yes";
  follow();

  // ------------------------------------------------------------------------------------------------------------ figures

  function coloured(value) {
    const styles = getComputedStyle(root);
    const colour = (text) => {
      const [, name, opacity] = text.match(/^var\(--([\w-]+)\)(?:\/([\d.]+))?$/) ?? [];
      if (!name) return text;
      const hex = styles.getPropertyValue(`--${name}`).trim();
      const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      return `rgba(${parts.join(",")},${opacity ?? 1})`;
    };
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, coloured(each)]));
    }
    return typeof value === "string" ? colour(value) : value;
  }

  function look({ ...layout }, names, width) {
    if (layout.showlegend) layout.height += 24 * Math.ceil((150 * names) / width);  // the rows of the legend
    const axis = { gridcolor: "var(--rule)", zerolinecolor: "var(--rule)", linecolor: "var(--rule)", automargin: true };
    const axes = Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));
    return coloured({
      hovermode: "x unified",
      dragmode: "zoom",
      ...layout,
      ...Object.fromEntries(axes.map((key) => [key, {
        ...axis, ...layout[key], title: { ...layout[key].title, standoff: 8, font: { color: "var(--muted)", size: 13 } },
        tickfont: { color: "var(--muted)" },
      }])),
      autosize: true,
      margin: { l: 8, r: 8, t: 24, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: "var(--ink)" },
      hoverlabel: { bgcolor: "var(--ground)", bordercolor: "var(--rule)", font: { color: "var(--ink)" }, namelength: 24 },
      legend: { orientation: "h", x: 0, xanchor: "left", yanchor: "bottom", ...layout.legend },
    });
  }

  function draw(figure, chart) {
    const plot = $(".plot", figure);
    const traces = chart.figure.data.map((trace) => trace.type === "heatmap"
      ? { ...trace, text: trace.text.map((words) => trace.z[0].map(() => words)) } : trace);
    const options = {
      responsive: true, displaylogo: false, scrollZoom: false,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
      toImageButtonOptions: { filename: figure.dataset.chart, scale: 2 },
    };
    const names = traces.filter((trace) => trace.showlegend).length;
    Plotly.react(plot, coloured(traces), look(chart.figure.layout, names, plot.clientWidth), options);
    if (!plot.dataset.keys) step(plot, chart);
    figure.dataset.drawn = "yes";
  }

  // Left and right move along the figure as the mouse does, and the values are read out.
  function step(plot, chart) {
    plot.dataset.keys = "yes";
    const said = $(".said", plot.parentElement);
    const longest = chart.figure.data.reduce((a, b) => ((b.x?.length ?? 0) > (a.x?.length ?? 0) && b.type === "scatter" ? b : a));
    if (longest.type !== "scatter") return;
    let at = -1;
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") { Plotly.Fx.unhover(plot); at = -1; said.textContent = ""; }
      if (!move) return;
      event.preventDefault();
      at = Math.min(longest.x.length - 1, Math.max(0, at + move));
      const x = longest.x[at];
      Plotly.Fx.hover(plot, { xval: x }, ["xy"]);
      const nearest = (trace) => trace.x.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(trace.x[best] - x) ? i : best), 0);
      const values = chart.figure.data.filter((trace) => trace.type === "scatter" && trace.hoverinfo !== "skip")
        .map((trace) => `${plain(trace.name)} ${short(trace.y[nearest(trace)])}`);
      said.textContent = `At ${short(x)}: ${values.join(", ")}`;
    });
  }

  function plain(escaped) {
    return escaped.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  }

  function short(value) {
    return value === null || value === undefined ? "unknown" : Number(value.toPrecision(4)).toLocaleString("en");
  }

  // The values of a figure: as a file, and as a table for readers without a mouse or without eyes.
  function tabulate(figure, chart) {
    $("button.csv", figure).addEventListener("click", () => {
      const address = URL.createObjectURL(new Blob([chart.csv], { type: "text/csv" }));
      const link = element("a", { href: address, download: `${figure.dataset.chart}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 1000);
    });
    const details = $("details", figure);
    details.addEventListener("toggle", () => {
      if (!details.open || $("table", details)) return;
      const [head, ...rows] = cells(chart.csv);
      const drop = rows.every((row) => row[0] === "") ? 1 : 0;
      const most = 400;
      const body = rows.slice(0, most).map((row) => element("tr", {}, ...row.slice(drop).map((text) => element("td", { text }))));
      details.append(element("div", { class: "values", tabindex: "0", role: "region", "aria-label": "Values of this figure" },
        element("table", {},
          element("thead", {}, element("tr", {}, ...head.slice(drop).map((text) => element("th", { text, scope: "col" })))),
          element("tbody", {}, ...body))));
      if (rows.length > most) details.append(element("p", { text: `The first ${most} of ${rows.length} values; the CSV has all.` }));
    });
  }

  function cells(csv) {
    const rows = [[]];
    const pattern = /("(?:[^"]|"")*"|[^,\n]*)(,|\n|$)/g;
    for (const [whole, cell, end] of csv.matchAll(pattern)) {
      if (whole === "") break;
      rows.at(-1).push(cell.startsWith('"') ? cell.slice(1, -1).replaceAll('""', '"') : cell);
      if (end === "\n") rows.push([]);
    }
    return rows.filter((row) => row.length);
  }

  // -------------------------------------------------------------------------------------------------------- completions

  function completions(place, table) {
    const rows = table.rows.map((row) => Object.fromEntries(table.fields.map((name, at) => [name, row[at]])));
    for (const row of rows) {
      row.question = table.asked[row.asked];
      row.all = [row.run, row.prompt, row.outcome, row.became, row.question, row.text ?? ""].join("\n").toLowerCase();
    }
    const [search, run, outcome, became] = ["search", "run", "outcome", "became"].map((name) => $(`[name=${name}]`, place));
    const fill = (select, values) => {
      for (const value of [...new Set(values)].sort()) select.append(element("option", { text: value, value }));
      select.closest("label").hidden = select.options.length < 3;
    };
    fill(run, rows.map((row) => row.run));
    fill(outcome, rows.map((row) => row.outcome));
    fill(became, rows.map((row) => row.kind));
    const list = $(".list", place), count = $(".count", place), size = 20;
    const [back, on] = $$("nav button", place);
    let page = 0;

    const show = (first = false) => {
      if (first) page = 0;
      const words = search.value.toLowerCase();
      const found = rows.filter((row) => (!words || row.all.includes(words))
        && (!run.value || row.run === run.value)
        && (!outcome.value || row.outcome === outcome.value)
        && (!became.value || row.kind === became.value));
      page = Math.min(page, Math.max(0, Math.ceil(found.length / size) - 1));
      const from = page * size;
      list.replaceChildren(...found.slice(from, from + size).map((row) => card(row, words)));
      const shown = found.length ? `${from + 1} to ${Math.min(from + size, found.length)} of ` : "";
      count.textContent = `${shown}${found.length} of the ${rows.length} rollouts on this page`;
      back.disabled = !page;
      on.disabled = from + size >= found.length;
      for (const field of [search, run, outcome, became]) memory.set(place.dataset.section + field.name, field.value);
    };

    for (const field of [search, run, outcome, became]) {
      const before = memory.get(place.dataset.section + field.name);
      if (before !== null) field.value = before;
      field.addEventListener("input", () => show(true));
    }
    back.addEventListener("click", () => { page -= 1; show(); });
    on.addEventListener("click", () => { page += 1; show(); });
    show();
  }

  function card(row, words) {
    const facts = [
      row.reward === null ? null : `reward ${short(row.reward)}`,
      row.score === null || row.score === row.reward ? null : `score ${short(row.score)}`,
      row.tokens === null ? null : `${row.tokens.toLocaleString("en")} tokens`,
      row.cut || null,
      `rollout ${row.at.toLocaleString("en")}`,
      row.version === null ? null : `version ${row.version}`,
      row.run,
    ].filter((fact) => fact !== null);
    const mark = { right: "✓", wrong: "✗", "partly right": "◐", "no score": "–" }[row.outcome];
    const summary = element("summary", {},
      element("span", { class: `outcome ${row.outcome.replace(" ", "-")}`, text: `${mark} ${row.outcome}` }),
      element("span", { class: "facts", text: facts.join(" · ") }),
      element("span", { class: "why", text: row.became }),
      element("span", { class: "start", text: preview(row.text ?? "the text is not logged", words) }));
    const details = element("details", { class: "rollout" }, summary);
    details.addEventListener("toggle", () => {
      if (!details.open || $("pre", details)) return;
      details.append(
        element("h4", { text: `Prompt ${row.prompt}` }), element("pre", {}, ...marked(row.question || "the log does not have the prompt's text", words)),
        element("h4", { text: "Completion" }), element("pre", {}, ...marked(row.text ?? "the text is not logged", words)));
    }, { once: false });
    return details;
  }

  function preview(text, words) {
    const flat = text.replace(/\s+/g, " ").trim();
    const at = words ? Math.max(0, flat.toLowerCase().indexOf(words) - 40) : 0;
    return (at ? "…" : "") + flat.slice(at, at + 160) + (flat.length > at + 160 ? "…" : "");
  }

  function marked(text, words) {
    if (!words) return [text];
    const parts = [], low = text.toLowerCase();
    if (low.length !== text.length) return [text];  // some letters change their length
    let from = 0;
    for (let at = low.indexOf(words); at >= 0; at = low.indexOf(words, from)) {
      parts.push(text.slice(from, at), element("mark", { text: text.slice(at, at + words.length) }));
      from = at + words.length;
    }
    return [...parts, text.slice(from)];
  }

  // ------------------------------------------------------------------------------------------------------------- follow

  function follow() {
    const bar = $(".following");
    if (!bar) return;
    const box = $("input", bar);
    box.checked = memory.get("follow") !== "no";
    box.addEventListener("change", () => memory.set("follow", box.checked ? "yes" : "no"));
    const again = () => {
      const typing = document.activeElement?.matches("input[type=search], select") || $("details.rollout[open]");
      if (!box.checked || typing) return setTimeout(again, 1000);
      memory.set("scroll", scrollY);
      location.reload();
    };
    setTimeout(again, 1000 * Number(bar.dataset.seconds));
  }
})();
