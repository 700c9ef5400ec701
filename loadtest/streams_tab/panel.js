// The tab "Streams" of Locust's page, and the section of its report.
// In the page: a section below the tabs, shown while the tab is chosen, with figures fetched every two seconds.
// In a report `window.streamsFigures` has the figures.
(() => {
  const POLL_MS = 2000;
  const CHOSEN_MS = 200;
  const COLOURS = ["#0f9d6e", "#c2410c"];
  const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [420, 150, 42, 6, 8, 20];
  const PRESELECTED = "ChatUser"; // Of the form: what most callers of a stack are.
  const CHARTS = [
    ["Time to first token, ms", [["p50", (p) => p.ttft.p50], ["p99", (p) => p.ttft.p99]]],
    ["Gap between messages, ms", [["p50", (p) => p.gap.p50], ["p99", (p) => p.gap.p99]]],
    ["Tokens a second", [["tokens", (p) => p.tokens]]],
    ["Requests a second", [["good", (p) => p.goodput], ["all", (p) => p.requests]]],
    ["Sequences at the predictors", [["running", (p) => p.running], ["waiting", (p) => p.waiting]]],
    ["KV cache in use, %", [["cache", (p) => p.cache]]],
  ];

  const element = (name, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(name), properties);
    node.append(...children);
    return node;
  };
  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 1) => (known(value) ? value.toFixed(digits) : "–");
  const quantiles = (values, names) => names.map((name) => number(values[name])).join(" / ");

  function table(heads, rows) {
    const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col", textContent: text })));
    const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
    return element("div", { className: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body)));
  }

  function rowsTable(rows) {
    const heads = ["call", "requests/s", "failed/s", "good %", "goodput/s", "tokens/s", "messages/s", "TTFT p50 / p90 / p99"];
    heads.push("TTFT at the server", "gap p50 / p90 / p99", "whole p50 / p99", "cancel p50 / p99");
    const all = ["p50", "p90", "p99"];
    return table(
      heads,
      rows.map((row) => [
        row.row,
        number(row.requests, 2),
        number(row.failed, 2),
        number(row.good_percent),
        number(row.goodput, 2),
        number(row.tokens),
        number(row.messages),
        quantiles(row.ttft, all),
        quantiles(row.server_ttft, all),
        quantiles(row.gap, all),
        quantiles(row.whole, ["p50", "p99"]),
        quantiles(row.cancel, ["p50", "p99"]),
      ]),
    );
  }

  function slowTable(figures) {
    const link = (text, href) => (href ? element("a", { href, textContent: text, target: "_blank", rel: "noopener" }) : "–");
    return table(
      ["call", "TTFT", "TTFT at the server", "longest gap", "whole", "record", "trace", "failure"],
      figures.slowest.map((slow) => [
        slow.row,
        number(slow.ttft_ms),
        number(slow.server_ttft_ms),
        number(slow.longest_gap_ms),
        number(slow.whole_ms),
        link("record", slow.record),
        slow.trace ? link("trace", slow.trace) : slow.trace_id || "–",
        slow.failure || "–",
      ]),
    );
  }

  const svgElement = (name, attributes = {}, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return node;
  };

  /** The next of 1, 2, 2.5, 5, 10 … above a value: the end of an axis. */
  function rounded(value) {
    const power = 10 ** Math.floor(Math.log10(value || 1));
    return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= value);
  }

  const short = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : String(+value.toFixed(value < 10 ? 2 : 1)));

  /** A chart with axes; the values of the second under the pointer stand in its caption. */
  function chart([title, lines], course) {
    const values = lines.flatMap(([, of]) => course.map(of)).filter(known);
    const top = rounded(values.length ? Math.max(...values) : 1);
    const [first, last] = [course[0]?.second ?? 0, course.at(-1)?.second ?? 1];
    const span = Math.max(1, last - first);
    const x = (point) => LEFT + ((WIDTH - LEFT - RIGHT) * (point.second - first)) / span;
    const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / top;
    const svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, at most ${number(values.length ? Math.max(...values) : 0)}` });
    for (const value of [0, top / 2, top]) {
      svg.append(svgElement("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      svg.append(svgElement("text", { x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
    }
    for (const part of [0, 0.5, 1]) {
      const anchor = { 0: "start", 0.5: "middle", 1: "end" }[part];
      svg.append(svgElement("text", { x: LEFT + (WIDTH - LEFT - RIGHT) * part, y: HEIGHT - 3, "text-anchor": anchor }, `${Math.round(span * part)} s`));
    }
    lines.forEach(([, of], index) => {
      const points = course.filter((point) => known(of(point))).map((point) => `${x(point).toFixed(1)},${y(of(point)).toFixed(1)}`);
      svg.append(svgElement("polyline", { points: points.join(" "), stroke: COLOURS[index], class: `line${index}` }));
    });
    const keys = lines.map(([name], index) => {
      const key = element("span", { className: "key", textContent: name });
      key.style.setProperty("--line", COLOURS[index]);
      return key;
    });
    const cursor = svgElement("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(cursor);
    const show = (point) => {
      cursor.setAttribute("visibility", point ? "visible" : "hidden");
      if (point) for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(point));
      lines.forEach(([name, of], index) => (keys[index].textContent = point ? `${name} ${number(of(point))}` : name));
      when.textContent = point ? `${point.second - first} s` : "";
    };
    const when = element("span", { className: "when" });
    svg.addEventListener("pointermove", (event) => {
      const at = first + (span * ((event.offsetX * WIDTH) / svg.clientWidth - LEFT)) / (WIDTH - LEFT - RIGHT);
      show(course.reduce((best, point) => (Math.abs(point.second - at) < Math.abs((best?.second ?? Infinity) - at) ? point : best), null));
    });
    svg.addEventListener("pointerleave", () => show(null));
    return element("figure", {}, element("figcaption", {}, element("span", { textContent: title }), ...keys, when), svg);
  }

  function predictors(figures) {
    const now = figures.predictors.map(
      (one) => `${one.name}: ${one.running} running, ${one.waiting} waiting, cache ${number(100 * one.cache)} %`,
    );
    return element("p", { textContent: now.length ? now.join(" · ") : "The gateway has not reported its predictors." });
  }

  let chosenWindow = null; // "last" or "whole"; null: the last seconds while the test runs, then all.

  /** What the table of calls shows: the last seconds or the whole test. */
  function windows(figures) {
    const { whole, runs } = figures;
    if (!whole) return [heading(figures.window_s), rowsTable(figures.rows)];
    const now = chosenWindow ?? (runs ? "last" : "whole");
    const choices = [["last", `last ${figures.window_s} s`], ["whole", `whole test, ${whole.window_s} s`]].map(([name, text]) => {
      const choice = element("button", { type: "button", textContent: text, onclick: () => ((chosenWindow = name), draw(section, figures)) });
      choice.setAttribute("aria-pressed", name === now);
      return choice;
    });
    const shown = now === "whole" ? whole : figures;
    return [heading(shown.window_s), element("p", { className: "windows" }, ...choices), rowsTable(shown.rows)];
  }

  const heading = (seconds) => element("h2", { textContent: `Streams: ${seconds} s, times in ms` });

  function draw(section, figures) {
    const [title, ...calls] = windows(figures);
    const parts = [title];
    if (figures.full) {
      const text = "A Locust process has no processor time left: its own delay is part of these times. Add processes (--processes).";
      parts.push(element("p", { className: "warning", role: "alert", textContent: text }));
    }
    parts.push(element("p", { textContent: `Good: ${figures.objective || "every request that succeeds"}.` }));
    if (figures.knee) parts.push(element("p", { id: "knee", textContent: figures.knee }));
    parts.push(...calls, predictors(figures));
    parts.push(element("div", { className: "charts" }, ...CHARTS.map((one) => chart(one, figures.course))));
    parts.push(element("h2", { textContent: "The ten slowest streams of the test" }), slowTable(figures));
    section.replaceChildren(...parts);
  }

  const section = element("section", { id: "streams", hidden: true });
  section.setAttribute("aria-label", "Streams");

  if (window.streamsFigures) {
    document.body.append(section);
    section.hidden = false;
    draw(section, window.streamsFigures);
    return;
  }

  // Locust's form begins with all classes, a mix that nobody's users are, and with the fields of the load folded.
  function prepareForm() {
    const rows = [...document.querySelectorAll("tbody tr")].filter((row) => row.querySelector('input[type="checkbox"]'));
    const form = document.querySelector("form");
    if (!form || form.dataset.prepared || !rows.length) return;
    form.dataset.prepared = "true";
    for (const row of rows) if (!row.textContent.startsWith(PRESELECTED)) row.querySelector('input[type="checkbox"]').click();
    [...form.querySelectorAll("button")].find(({ textContent }) => textContent === "Custom parameters")?.click();
  }

  let due = 0;
  async function show() {
    prepareForm();
    const chosen = document.querySelector('[role="tab"][aria-selected="true"]');
    section.hidden = chosen?.textContent !== "Streams";
    // The tab's own place, which Locust leaves empty, goes with each run's form.
    const place = chosen?.closest(".MuiContainer-root") ?? document.body;
    if (!section.hidden && section.parentElement !== place) place.append(section);
    if (section.hidden || Date.now() < due || section.querySelector("svg:hover")) return; // Values under the pointer stay.
    due = Date.now() + POLL_MS;
    try {
      const response = await fetch("./streams/figures");
      if (response.ok) draw(section, await response.json());
    } catch {
      // Locust is ending, or busy: the next poll shows.
    }
  }
  setInterval(show, CHOSEN_MS);
})();
