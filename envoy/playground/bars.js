// One bar a token, as high as the gap before it: a pause is seen.

import { makeSvg, milliseconds, percentile } from "./dom.js";

const STEP = 4;
const WIDTH = 3;
const HEIGHT = 28;
const LEAST = 2;
const LONGEST = 2000; // Tokens that are drawn; an answer has hardly more.

/** The gaps of one answer; `element` is the drawing. */
export class Bars {
  constructor() {
    this.gaps = [];
    this.svg = makeSvg("svg", { height: HEIGHT, width: 0, "aria-hidden": "true" });
    this.element = document.createElement("div");
    this.element.className = "bars";
    this.element.setAttribute("role", "img");
    this.element.setAttribute("aria-label", "Gaps between tokens");
    this.element.append(this.svg);
    this.scale = 0;
  }

  /** Adds tokens that came together, so long after those before; `pause`: another predictor has continued. */
  add(tokens, gap, pause = false) {
    for (let i = 0; i < tokens && this.gaps.length < LONGEST; i++) {
      const own = i === 0 ? gap : 0;
      const bar = makeSvg("rect", { x: this.gaps.length * STEP, width: WIDTH, rx: 1 });
      if (pause && i === 0) bar.setAttribute("class", "late");
      bar.append(makeSvg("title", {}, milliseconds(own)));
      this.gaps.push(own);
      this.svg.append(bar);
      this.place(bar, own);
    }
    this.svg.setAttribute("width", this.gaps.length * STEP);
    this.element.scrollLeft = this.element.scrollWidth;
  }

  /** The height of a bar; a longer gap than all before makes the others lower. */
  place(bar, gap) {
    if (gap > this.scale) {
      this.scale = gap;
      [...this.svg.children].forEach((other, i) => draw(other, this.gaps[i], gap));
    } else draw(bar, gap, this.scale);
  }

  /** Says what is drawn, for users of screen readers. */
  label() {
    if (!this.gaps.length) return;
    const [median, longest] = [percentile(this.gaps, 0.5), Math.max(...this.gaps)];
    const text = `Gaps between ${this.gaps.length} tokens: median ${milliseconds(median)}, longest ${milliseconds(longest)}`;
    this.element.setAttribute("aria-label", text);
  }
}

function draw(bar, gap, scale) {
  const height = Math.max(LEAST, scale ? (gap / scale) * HEIGHT : 0);
  bar.setAttribute("y", HEIGHT - height);
  bar.setAttribute("height", height);
}
