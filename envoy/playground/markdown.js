// Markdown as elements: what answers use of CommonMark, made without HTML, so that no answer can bring a script or an image.
//
// Headings, lists, quotations, tables, fenced code; emphasis, code and links to http(s) within a line. All else is text.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.+?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ROW = /^\s*\|(.*)\|\s*$/;
const BLOCK = [FENCE, HEADING, ITEM, QUOTE, RULE, ROW];
// A bounded length, so that no text of an answer makes an expression slow.
const INLINE = /(`+)([^`]{1,500})\1|\*\*(\S(?:[^*]{0,500}\S)?)\*\*|\*(\S(?:[^*]{0,500}\S)?)\*|\[([^\]]{1,300})\]\((https?:\/\/[^\s)]{1,1000})\)/;

/** Whether a text has anything that `markdown` shows in another way than a text. */
export const hasMarkdown = (text) => INLINE.test(text) || text.split("\n").some((line) => BLOCK.some((kind) => kind.test(line)));

/** The blocks of a text, each an element with `end`: the number of characters of the text up to its end. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  let end = 0;
  const take = () => {
    end += lines[at].length + 1;
    return lines[at++];
  };
  const takeWhile = (fits) => {
    const taken = [];
    while (at < lines.length && fits(lines[at])) taken.push(take());
    return taken;
  };
  while (at < lines.length) {
    const line = lines[at];
    let block = null;
    if (line.trim() === "") take();
    else if (FENCE.test(line)) block = fenced(take(), takeWhile, () => at < lines.length && take());
    else if (RULE.test(line)) block = take() && make("hr");
    else if (HEADING.test(line)) block = heading(take());
    else if (QUOTE.test(line)) block = make("blockquote", {}, ...inline(takeWhile((each) => QUOTE.test(each)).map((each) => each.match(QUOTE)[1]).join("\n")));
    else if (ROW.test(line)) block = table(takeWhile((each) => ROW.test(each)));
    else if (ITEM.test(line)) block = list(takeWhile((each) => ITEM.test(each) || /^\s+\S/.test(each)));
    else block = make("p", {}, ...inline(takeWhile((each) => each.trim() !== "" && (each === line || !BLOCK.some((kind) => kind.test(each)))).join("\n")));
    if (block) blocks.push({ block, end });
  }
  return blocks;
}

function fenced(opening, takeWhile, closing) {
  const fence = opening.match(FENCE)[1];
  const code = takeWhile((line) => !line.trim().startsWith(fence));
  closing();
  return make("pre", { className: "code", tabIndex: 0 }, make("code", {}, code.join("\n")));
}

/** A heading below those of the page. */
function heading(line) {
  const [, marks, text] = line.match(HEADING);
  return make(`h${Math.min(6, marks.length + 2)}`, {}, ...inline(text));
}

/** The items of a list; deeper ones are marked by their indent. */
function list(lines) {
  const items = [];
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found) items.push({ indent: found[1].length, text: found[3] });
    else items.at(-1).text += `\n${line.trim()}`;
  }
  const isNumbered = /\d/.test(lines[0].match(ITEM)[2]);
  const made = make(isNumbered ? "ol" : "ul");
  if (isNumbered) made.start = parseInt(lines[0].trim(), 10);
  for (const { indent, text } of items) {
    const item = make("li", {}, ...inline(text));
    if (indent) item.style.marginLeft = `${Math.min(indent, 12) * 0.5}em`;
    made.append(item);
  }
  return made;
}

function table(lines) {
  const cells = lines.map((line) => line.match(ROW)[1].split("|").map((cell) => cell.trim()));
  const isHeaded = cells.length > 1 && cells[1].every((cell) => /^:?-+:?$/.test(cell));
  const row = (tag, texts) => make("tr", {}, ...texts.map((text) => make(tag, {}, ...inline(text))));
  const body = cells.slice(isHeaded ? 2 : 0).map((texts) => row("td", texts));
  return make("table", {}, ...(isHeaded ? [make("thead", {}, row("th", cells[0]))] : []), make("tbody", {}, ...body));
}

/** The pieces of a text within a block. */
function inline(text) {
  const pieces = [];
  let rest = text;
  for (let found = rest.match(INLINE); found; found = rest.match(INLINE)) {
    const [whole, ticks, code, strong, emphasised, label, address] = found;
    if (found.index) pieces.push(rest.slice(0, found.index));
    if (ticks) pieces.push(make("code", {}, code));
    else if (strong) pieces.push(make("strong", {}, strong));
    else if (emphasised) pieces.push(make("em", {}, emphasised));
    else pieces.push(make("a", { href: address, rel: "noreferrer", target: "_blank" }, label));
    rest = rest.slice(found.index + whole.length);
  }
  if (rest) pieces.push(rest);
  return pieces;
}
