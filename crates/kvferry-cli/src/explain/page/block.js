// One block of the pool, with all groups that lie over it.

// Calls draw(start, length, isBlended) for the runs of a shape, as finely as `scale` can show.
function runs(shape, scale, draw) {
  const { offset, run, repeats } = shape;
  const extent = (level) => repeats.slice(level)
    .reduce((sum, { count, distance }) => sum + (count - 1) * distance, run);
  const walk = (start, level) => {
    if (level === repeats.length) { draw(start, run, false); return; }
    const { count, distance } = repeats[level];
    if (distance * scale < 2.4 || count > 800) { draw(start, extent(level), true); return; }
    for (let i = 0; i < count; i += 1) walk(start + i * distance, level + 1);
  };
  walk(offset, 0);
}
const runCount = (shape) => shape.repeats.reduce((product, { count }) => product * count, 1);
const size = (shape) => shape.run * runCount(shape);
function shapeText(shape) {
  const count = runCount(shape);
  return count === 1 ? `${bytes(shape.run)} in one run` : `${many(count, "run")} of ${bytes(shape.run)}`;
}

function drawBlock() {
  const svg = $("block"), width = Math.max(svg.clientWidth, 640), left = 132, gap = 12, high = 30;
  svg.replaceChildren();
  hatch(svg, "pad-block");
  const frame = decodeFrame();
  let [from, to] = [0, frame.row];
  if (chosen.layer >= 0) {
    const page = decodePages()[chosen.layer];
    [from, to] = [page.at, page.at + page.bytes];
  }
  to = from + Math.max(64, (to - from) / chosen.zoom);
  const scale = (width - left) / (to - from);
  const x = (at) => left + (Math.min(Math.max(at, from), to) - from) * scale;
  const bar = (at, length, y, attributes, tip) => {
    const [a, b] = [x(at), x(at + length)];
    if (at >= to || at + length <= from) return null;
    const node = make(svg, "rect", { x: a, y, width: Math.max(b - a, .4), height: high, ...attributes });
    if (tip) node.dataset.tip = tip;
    return node;
  };
  let y = 22;
  frame.groups.forEach((pages, index) => {
    const group = data.decode.groups[index];
    const isChosen = index === chosen.group;
    make(svg, "text", { x: 0, y: y + 19, "font-weight": isChosen ? 700 : 400 }, group.name);
    make(svg, "rect", { x: left, y, width: width - left, height: high, fill: "none", stroke: "var(--line)",
      "stroke-dasharray": "3 3" });
    for (const page of pages) {
      const used = [...page.states, ...page.scratch].reduce((sum, shape) => sum + size(shape), 0);
      const padding = page.bytes - used;
      bar(page.at, page.bytes, y, { fill: "url(#pad-block)", class: "page" },
        `${page.name}\n${bytes(page.bytes)} a block, ${padding > 0 ? bytes(padding) + " of padding" : "no padding"}`);
      for (const shape of [...page.states, ...page.scratch]) {
        const tip = `${page.name}\n${meaning(shape.name)}\n${shapeText(shape)}, from byte ${number(shape.offset)} of the page`;
        runs(shape, scale, (start, length, isBlended) => bar(page.at + start, length, y,
          { fill: colour(shape.name), "fill-opacity": isBlended ? .55 : .92 }, tip));
      }
      if (page.kernel) {
        const { count, distance } = page.kernel;
        if (distance * scale > 3) {
          for (let i = 1; i < count; i += 1) {
            if (page.at + i * distance > from && page.at + i * distance < to) {
              const at = x(page.at + i * distance);
              make(svg, "line", { x1: at, x2: at, y1: y - 3, y2: y + high + 3, stroke: "var(--ink)", "stroke-opacity": .5 });
            }
          }
        }
      }
      if (page.at >= from && page.at < to && page.bytes * scale > 4) {
        make(svg, "line", { x1: x(page.at), x2: x(page.at), y1: y - 4, y2: y + high + 4, stroke: "var(--ink)", "stroke-width": 1.4 });
      }
    }
    if (isChosen) {
      make(svg, "rect", { x: left - 3, y: y - 6, width: width - left + 6, height: high + 12, rx: 5, fill: "none",
        stroke: "var(--accent)", "stroke-width": 1.6 });
    }
    y += high + gap;
  });
  make(svg, "text", { x: left, y: 11, class: "soft" }, `byte ${number(Math.round(from))}`);
  make(svg, "text", { x: width, y: 11, class: "soft", "text-anchor": "end" }, `byte ${number(Math.round(to))}`);
  svg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  svg.style.height = `${y}px`;

  const group = data.decode.groups[chosen.group];
  const overlay = frame.groups.filter((pages) => pages.length).length;
  const parts = [
    `A block of the pool has ${bytes(frame.row)} on this rank.`,
    overlay > 1 ? `${overlay} groups lie over the same bytes; a block belongs to one of them at a time.` : "",
    group.block === null ? "In this group a block holds one sequence’s states."
      : `In this group a block holds ${many(group.block, "token")}${group.kernel !== group.block
        ? `, in ${group.block / group.kernel} kernel blocks of ${group.kernel} (thin lines where there is room)` : ""}.`,
    "Hatched bytes are padding.",
  ];
  $("block-text").textContent = parts.filter(Boolean).join(" ");

  const names = new Set();
  for (const pages of frame.groups) for (const page of pages) {
    for (const shape of [...page.states, ...page.scratch]) names.add(tail(shape.name));
  }
  const legend = $("legend");
  legend.replaceChildren();
  for (const name of names) {
    const item = html(legend, "li");
    html(item, "i", { style: `background:${colour(name)}` });
    item.append(meaning(name));
  }
  const item = html(legend, "li");
  html(item, "i", { style: "background:repeating-linear-gradient(45deg,var(--pad) 0 3px,var(--pad-line) 3px 5px)" });
  item.append("padding");
}

