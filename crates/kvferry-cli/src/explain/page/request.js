// The whole request: the verdict, who reads from whom, which slice each rank holds. Draws the page.

function drawSlices() {
  const table = $("slices");
  table.replaceChildren();
  const states = [];
  for (const page of decodePages()) for (const { name } of page.states) {
    if (!states.includes(tail(name))) states.push(tail(name));
  }
  const list = moves().ribbons;
  const sourceGroup = list.length ? list[0].source_group : chosen.group;
  for (const state of states) {
    for (const [side, ranks, group] of [["prefill", data.prefill.ranks, sourceGroup], ["decode", data.decode.ranks, chosen.group]]) {
      const row = html(table, "tr", { class: side === "prefill" ? "next" : "" });
      html(row, "th", { scope: "row" }, side === "prefill" ? `${tail(state)} · prefill` : `${tail(state)} · decode`);
      const cells = html(html(row, "td"), "div", { class: "cells" });
      ranks.forEach((rank, index) => {
        const axes = rank.held[group] && rank.held[group][state];
        if (!axes) return;
        const split = axes.find((part) => part.end - part.start < part.length) || axes[0];
        const cell = html(cells, "div", { class: `cell${side === "decode" && index === chosen.rank ? " chosen" : ""}` });
        const track = html(cell, "div", { class: "track" });
        const { axis, start, end, length } = split || { axis: "record", start: 0, end: 1, length: 1 };
        html(track, "i", { style: `left:${100 * start / length}%;width:${Math.max(100 * (end - start) / length, 1)}%;background:${colour(state)}` });
        const text = end - start === length ? "all" : end - start === 1 ? `${axis} ${start}` : `${axis} ${start}–${end - 1}`;
        html(html(cell, "span"), "b", {}, rank.label);
        html(cell, "span", {}, text);
        cell.dataset.tip = `${rank.label} holds of ${state}:\n` + (axes.length
          ? axes.map((part) => `${part.axis} ${part.start} to ${part.end - 1} of ${part.length}`).join("\n") : "whole records");
      });
    }
  }
}

// What becomes of the pair with the engine’s own connector, by outcome: a mark, a class, and what it means.
const OUTCOMES = {
  works: ["✓", "good", "Its own connector is not known to fail here."],
  refuses: ["✕", "warn", "Its own connector stops with an error:"],
  "silently wrong": ["✕", "bad", "Its own connector reports success, but decode gets wrong bytes:"],
};

function drawVerdict() {
  const [engine, moved] = [data.engine, data.transfer];
  const model = data.draft ? `${data.model} with draft ${data.draft}` : data.model;
  const says = (outcome) => outcome === "silently wrong" ? "is silently wrong" : outcome;
  const verdict = engine ? `kvferry works, ${engine.name} ${says(engine.outcome)}` : "kvferry works";
  document.title = `${model}: ${verdict}`;
  const title = $("title");
  title.append(`${model}: `);
  html(title, "span", { class: "good" }, "kvferry works");
  if (engine) {
    title.append(", ");
    html(title, "span", { class: OUTCOMES[engine.outcome][1] }, `${engine.name} ${says(engine.outcome)}`);
  }
  const card = (name, mark, kind, outcome, text) => {
    const node = html($("verdicts"), "div", { class: `verdict ${kind}` });
    html(node, "span", { class: "mark", "aria-hidden": "true" }, mark);
    const body = html(node, "div");
    html(body, "strong", {}, `${name} ${outcome}`);
    html(body, "p", {}, text);
  };
  card("kvferry", "✓", "good", "works", `Every byte that decode needs lands in its place, in `
    + `${many(moved.copies, "copy", "copies")}. It moves ${moved.text}.`);
  if (engine) {
    const [mark, kind, text] = OUTCOMES[engine.outcome];
    card(engine.name, mark, kind, says(engine.outcome), engine.outcome === "works" ? text : `${text} ${engine.reason}.`);
  }
  const add = (term, text) => { html($("facts"), "dt", {}, term); html($("facts"), "dd", {}, text); };
  add("prefill", data.prefill.text);
  add("decode", data.decode.text);
  add("request", `${many(data.tokens, "token")}, ${data.cached ? number(data.cached) + " cached" : "none cached"}, ${data.blocks} blocks`);
  if (data.link) add("link", `${data.link.text.join("; ")}.`);
}

function drawMatrix() {
  const table = $("matrix");
  table.replaceChildren();
  const found = new Map(data.transfer.pairs.map((pair) => [`${pair.decode}|${pair.prefill}`, pair]));
  const most = Math.max(...data.transfer.pairs.map((pair) => pair.bytes), 1);
  const head = html(html(table, "thead"), "tr");
  html(head, "th", { scope: "col" }, "decode ↓  prefill →");
  for (const rank of data.prefill.ranks) html(head, "th", { scope: "col" }, rank.label);
  const body = html(table, "tbody");
  data.decode.ranks.forEach((rank, d) => {
    const row = html(body, "tr");
    html(row, "th", { scope: "row" }, rank.label);
    data.prefill.ranks.forEach((other, p) => {
      const cell = html(row, "td");
      const pair = found.get(`${rank.label}|${other.label}`);
      if (!pair) { html(cell, "span", { class: "none" }, "·"); return; }
      const isChosen = d === chosen.rank && (chosen.source < 0 || chosen.source === p);
      const button = html(cell, "button", { type: "button", "aria-pressed": isChosen,
        "data-decode": d, "data-prefill": p, "data-bytes": pair.bytes, "data-copies": pair.copies,
        style: `background:color-mix(in srgb, var(--accent) ${Math.round(6 + 34 * pair.bytes / most)}%, transparent)` }, bytes(pair.bytes));
      button.dataset.tip = `decode ${rank.label} from prefill ${other.label}\n${bytes(pair.bytes)} in ${many(pair.copies, "copy", "copies")}\nshortest ${bytes(pair.shortest)}, mean ${bytes(Math.round(pair.mean))}, longest ${bytes(pair.longest)}`;
      button.addEventListener("click", () => { chosen.rank = d; chosen.source = p; draw(); focusPair(d, p); });
    });
  });
}
function focusPair(d, p) {
  const button = document.querySelector(`.matrix button[data-decode="${d}"][data-prefill="${p}"]`);
  if (button) button.focus();
}

function draw() { fill(); drawMatrix(); drawBlock(); drawCopies(); drawSlices(); }

for (const key of ["rank", "group", "layer", "source", "zoom"]) {
  $(key).addEventListener("change", () => { chosen[key] = Number($(key).value); draw(); });
}
$("copies").addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  activate(active < 0 && step < 0 ? -1 : active + step);
});
$("copies").addEventListener("blur", () => {
  $("copies").classList.remove("faded");
  if (active >= 0 && ribbons[active]) ribbons[active].classList.remove("active");
});
document.addEventListener("pointermove", (event) => {
  const tip = $("tip"), node = event.target.closest ? event.target.closest("[data-tip]") : null;
  if (!node) { tip.style.opacity = 0; return; }
  tip.textContent = node.dataset.tip;
  tip.style.opacity = 1;
  const [w, h] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - w - 8)}px`;
  tip.style.top = `${event.clientY + 18 + h > innerHeight ? event.clientY - h - 12 : event.clientY + 18}px`;
});
addEventListener("resize", () => { drawBlock(); drawCopies(); });
drawVerdict();
start();
draw();
