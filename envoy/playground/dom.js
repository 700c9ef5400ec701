// Elements of the page, and figures as it writes them. What a call answers is only ever inserted as text.

export const byId = (id) => document.getElementById(id);

/** An element with properties or, where it has none of that name, attributes; those that are undefined are left out. */
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** An element of SVG with attributes. */
export function makeSvg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const button = (text, onclick, properties = {}) =>
  make("button", { type: "button", textContent: text, onclick, ...properties });

/** Terms with their descriptions; pairs without a value are left out. */
export function definitions(pairs) {
  const given = pairs.filter(([, value]) => value !== undefined && value !== "");
  return make("dl", {}, ...given.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
}

/** A button that puts a text on the clipboard; a page without that right (HTTP beyond localhost) selects it instead. */
export function copyButton(source, label = "Copy") {
  const copy = button(label, async () => {
    try {
      await navigator.clipboard.writeText(source.textContent);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      copy.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => (copy.textContent = label), 2000);
  });
  return copy;
}

/** Reads a text to users of screen readers. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** Shows what went wrong and what to do about it, or nothing. */
export function showFailure(element, error) {
  element.hidden = !error;
  element.replaceChildren();
  if (!error) return;
  element.append(error.message);
  if (error.advice) element.append(make("span", { className: "advice" }, error.advice));
}

export function milliseconds(value) {
  if (value === undefined || Number.isNaN(value)) return "–";
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export function bytes(value) {
  const unit = ["B", "KiB", "MiB", "GiB"].findLast((_, power) => value >= 1024 ** power) ?? "B";
  const power = ["B", "KiB", "MiB", "GiB"].indexOf(unit);
  return `${(value / 1024 ** power).toFixed(power && value < 10 * 1024 ** power ? 1 : 0)} ${unit}`;
}

export const count = (number, unit) => `${number.toLocaleString("en")} ${unit}${number === 1 ? "" : "s"}`;

/** The smallest value that a share of the values does not exceed. */
export function percentile(values, share) {
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}
