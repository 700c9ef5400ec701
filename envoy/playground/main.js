// The playground: its tabs, the drawer with the settings, and the start.

import { byId } from "./dom.js";
import { openConnect } from "./connect.js";
import { openModels, startModels } from "./models.js";
import { startPlay } from "./play.js";
import { openRecord } from "./record.js";
import { follow, startRequests, stopFollowing } from "./requests.js";
import { readSettings } from "./settings.js";
import { look } from "./status.js";
import { showUsage } from "./usage.js";

const WIDE = matchMedia("(min-width: 60rem)");
const tabs = [...document.querySelectorAll('[role="tab"]')];

/** Shows the tab, and the record, that the address names: #play, #requests, #requests/ID, #models, #connect. */
function go() {
  const [name, recordId] = location.hash.slice(1).split("/");
  const chosen = tabs.find(({ id }) => id === `tab-${name}`) ?? tabs[0];
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", tab === chosen);
    tab.tabIndex = tab === chosen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = tab !== chosen;
  }
  const isLog = chosen.id === "tab-requests";
  byId("log").hidden = Boolean(recordId);
  byId("one-record").hidden = !recordId;
  if (isLog && recordId) openRecord(recordId);
  if (isLog && !recordId) follow();
  else stopFollowing();
  if (chosen.id === "tab-models") openModels();
  if (chosen.id === "tab-connect") openConnect();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => (location.hash = `#${tab.id.slice("tab-".length)}`));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length];
    next.focus();
    next.click();
  });
}

function setDrawer(isOpen) {
  byId("drawer").hidden = !isOpen;
  byId("drawer-toggle").setAttribute("aria-expanded", isOpen);
  byId("drawer-toggle").hidden = isOpen && WIDE.matches; // It has a button of its own to close it.
}

byId("drawer-toggle").addEventListener("click", () => {
  setDrawer(byId("drawer").hidden);
  if (!byId("drawer").hidden) byId("model").focus();
});
byId("drawer-close").addEventListener("click", () => {
  setDrawer(false);
  byId("drawer-toggle").focus();
});
byId("drawer").addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !WIDE.matches) byId("drawer-close").click();
});
WIDE.addEventListener("change", () => setDrawer(WIDE.matches));
setDrawer(WIDE.matches);

for (const close of document.querySelectorAll("dialog .close")) {
  close.addEventListener("click", () => close.closest("dialog").close());
}
addEventListener("hashchange", go);
// The drawer begins below the header, which may take several lines.
const main = document.querySelector("main");
new ResizeObserver(() => document.documentElement.style.setProperty("--top", `${main.offsetTop}px`)).observe(main);

startModels();
startRequests();
await readSettings().catch(() => {}); // Without them traces are shown and not linked.
startPlay();
go();
await look();
showUsage().catch(() => {});
