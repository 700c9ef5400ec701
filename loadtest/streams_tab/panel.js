// The tab "Streams" of Locust's page, and the section of its report.
// In the page: a section below the tabs, shown while the tab is chosen, with figures fetched every two seconds.
// In a report `window.streamsFigures` has the figures.
(() => {
  const POLL_MS = 2000;
  const CHOSEN_MS = 200;
  const COLOURS = ["#0f9d6e", "#c2410c"];
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

  function rowsTable(figures) {
    const heads = ["call", "requests/s", "failed/s", "good %", "goodput/s", "tokens/s", "messages/s", "TTFT p50 / p90 / p99"];
    heads.push("TTFT at the server", "gap p50 / p90 / p99", "whole p50 / p99", "cancel p50 / p99");
    const all = ["p50", "p90", "p99"];
    return table(
      heads,
      figures.rows.map((row) => [
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

  function chart([title, lines], course) {
    const values = lines.flatMap(([, of]) => course.map(of)).filter(known);
    const greatest = values.length ? Math.max(...values) : 0;
    const [first, last] = [course[0]?.second ?? 0, course.at(-1)?.second ?? 1];
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${title}, at most ${number(greatest)}`);
    lines.forEach(([, of], index) => {
      const line = document.createElementNS(svg.namespaceURI, "polyline");
      const points = course.filter((point) => known(of(point)));
      const x = (point) => (100 * (point.second - first)) / Math.max(1, last - first);
      const y = (point) => 100 - (98 * of(point)) / (greatest || 1);
      line.setAttribute("points", points.map((point) => `${x(point).toFixed(2)},${y(point).toFixed(2)}`).join(" "));
      line.setAttribute("stroke", COLOURS[index]);
      svg.append(line);
    });
    const keys = lines.map(([name], index) => {
      const key = element("span", { className: "key", textContent: name });
      key.style.setProperty("--line", COLOURS[index]);
      return key;
    });
    const axis = element("div", { className: "axis" }, element("span", { textContent: `0 to ${number(greatest)}` }));
    axis.append(element("span", { textContent: `${last - first} s` }));
    return element("figure", {}, element("figcaption", {}, element("span", { textContent: title }), ...keys), svg, axis);
  }

  function predictors(figures) {
    const now = figures.predictors.map(
      (one) => `${one.name}: ${one.running} running, ${one.waiting} waiting, cache ${number(100 * one.cache)} %`,
    );
    return element("p", { textContent: now.length ? now.join(" · ") : "The gateway has not reported its predictors." });
  }

  function draw(section, figures) {
    const parts = [element("h2", { textContent: `Streams: last ${figures.window_s} s, times in ms` })];
    if (figures.full) {
      const text = "A Locust process has no processor time left: its own delay is part of these times. Add processes (--processes).";
      parts.push(element("p", { className: "warning", role: "alert", textContent: text }));
    }
    parts.push(element("p", { textContent: `Good: ${figures.objective || "every request that succeeds"}.` }));
    if (figures.knee) parts.push(element("p", { id: "knee", textContent: figures.knee }));
    parts.push(rowsTable(figures), predictors(figures));
    parts.push(element("div", { className: "charts" }, ...CHARTS.map((one) => chart(one, figures.course))));
    parts.push(element("h2", { textContent: "The ten slowest requests of the test" }), slowTable(figures));
    section.replaceChildren(...parts);
  }

  const section = element("section", { id: "streams", hidden: true });
  section.setAttribute("aria-label", "Streams");

  if (window.streamsFigures) {
    document.body.append(section);
    section.hidden = false;
    draw(section, window.streamsFigures);
    section.querySelector("h2").textContent = `Streams: ${window.streamsFigures.window_s} s, times in ms`;
    return;
  }

  let due = 0;
  async function show() {
    const chosen = document.querySelector('[role="tab"][aria-selected="true"]');
    section.hidden = chosen?.textContent !== "Streams";
    // The tab's own place, which Locust leaves empty, goes with each run's form.
    const place = chosen?.closest(".MuiContainer-root") ?? document.body;
    if (!section.hidden && section.parentElement !== place) place.append(section);
    if (section.hidden || Date.now() < due) return;
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
