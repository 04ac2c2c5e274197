// Every copy of one block, as a ribbon.

let ribbons = [], active = -1;

function drawCopies() {
  const svg = $("copies"), width = Math.max(svg.clientWidth, 640);
  svg.replaceChildren();
  hatch(svg, "pad-copies");
  const list = chosenRibbons();
  ribbons = []; active = -1;
  $("detail").textContent = "";

  // The pages on both sides, one under the other.
  const sources = new Map();
  for (const set of list) {
    if (!sources.has(set.source)) sources.set(set.source, new Map());
    const page = sourceFrame(set.source).groups[set.source_group][set.source_page];
    const end = set.source_at + (set.rounds - 1) * set.source_round + (set.count - 1) * set.source_step + set.bytes;
    const key = `${set.source_group}/${set.source_page}`;
    const known = sources.get(set.source).get(key);
    const blocks = Math.max(Math.ceil(end / page.bytes), known ? known.blocks : 1);
    sources.get(set.source).set(key, { page, blocks, length: blocks * page.bytes, order: set.source_group * 1e6 + set.source_page });
  }
  const targets = new Map();
  for (const set of list) {
    const page = decodePages()[set.target_page];
    targets.set(set.target_page, { page, blocks: 1, length: page.bytes });
  }
  const rows = [...targets].sort((a, b) => a[0] - b[0]);
  const sum = (entries) => entries.reduce((total, entry) => total + entry.length, 0);
  const columns = [...sources].sort((a, b) => a[0] - b[0]);
  const leftBytes = columns.reduce((total, [, pages]) => total + sum([...pages.values()]), 0);
  const rightBytes = sum(rows.map(([, entry]) => entry));
  const pageGap = Math.max(rows.length, columns.reduce((n, [, p]) => n + p.size, 0)) > 24 ? 1 : 5, rankGap = 24;
  const room = Math.max(rows.length, columns.length) > 2 ? 560 : 400;
  const scale = room / Math.max(leftBytes, rightBytes, 1);
  const [barWidth, leftX, rightX] = [46, 190, width - 236];

  const label = (x, y, text, anchor, cls) => make(svg, "text", { x, y, "text-anchor": anchor, class: cls || "" }, text);
  const place = (entry, x, y, side) => {
    entry.y = y;
    const height = Math.max(entry.length * scale, 1.5);
    const box = make(svg, "rect", { x, y, width: barWidth, height, fill: `url(#pad-copies)`, stroke: "var(--line)" });
    box.dataset.tip = `${side}\n${entry.page.name}, ${many(entry.blocks, "block")} of ${bytes(entry.page.bytes)}`;
    for (let block = 0; block < entry.blocks; block += 1) {
      if (entry.blocks > 40) break;
      for (const shape of [...entry.page.states, ...entry.page.scratch]) {
        runs(shape, scale, (start, length, isBlended) => {
          const top = y + (block * entry.page.bytes + start) * scale;
          const node = make(svg, "rect", { x, y: top, width: barWidth, height: Math.max(length * scale, .3),
            fill: colour(shape.name), "fill-opacity": isBlended ? .5 : .85 });
          node.dataset.tip = `${side}\n${entry.page.name}\n${meaning(shape.name)}\n${shapeText(shape)}`;
        });
      }
      if (block > 0 && entry.page.bytes * scale > 6) {
        const at = y + block * entry.page.bytes * scale;
        make(svg, "line", { x1: x - 4, x2: x + barWidth + 4, y1: at, y2: at, stroke: "var(--ink)" });
      }
    }
    return height;
  };

  // A page's name beside it, where there is room for one more line.
  const names = (x, anchor) => {
    let free = 0;
    return (entry, y, height) => {
      const middle = y + height / 2;
      if (middle < free) return;
      label(x, middle + 4, entry.page.name, anchor, "soft");
      free = middle + 15;
    };
  };
  let y = 20, bottom = 20;
  for (const [rank, pages] of columns) {
    const own = list.filter((set) => set.source === rank);
    const moved = own.reduce((total, set) => total + set.bytes * set.count * set.rounds, 0);
    const copies = own.reduce((total, set) => total + set.copies, 0);
    const heading = label(leftX + barWidth, y, `prefill ${data.prefill.ranks[rank].label}`, "end", "heading");
    make(heading, "tspan", { class: "soft" }, `  ${bytes(moved)}, ${many(copies, "copy", "copies")}`);
    y += 8;
    const name = names(leftX - 10, "end");
    for (const entry of [...pages.values()].sort((a, b) => a.order - b.order)) {
      const height = place(entry, leftX, y, `prefill ${data.prefill.ranks[rank].label}`);
      name(entry, y, height);
      y += height + pageGap;
    }
    y += rankGap;
  }
  bottom = Math.max(bottom, y);
  y = 20;
  label(rightX, y, `decode ${decodeRank().label}`, "start", "heading");
  y += 8;
  const name = names(rightX + barWidth + 10, "start");
  for (const [, entry] of rows) {
    const height = place(entry, rightX, y, `decode ${decodeRank().label}`);
    name(entry, y, height);
    y += height + pageGap;
  }
  bottom = Math.max(bottom, y);

  // One ribbon for each copy, or for many at equal distances where they could not be told apart.
  const alone = Math.max(1, Math.min(128, Math.floor(3000 / Math.max(list.length, 1))));
  for (const set of list) {
    const from = sources.get(set.source).get(`${set.source_group}/${set.source_page}`);
    const to = targets.get(set.target_page);
    const page = to.page;
    const states = page.states.slice(set.first_state, set.last_state + 1).map((shape) => shape.name);
    const total = set.count * set.rounds;
    const ribbon = (at, targetAt, span, targetSpan, copies, moved) => {
      const [x1, x2] = [leftX + barWidth, rightX], middle = (x1 + x2) / 2;
      const [a, b] = [from.y + at * scale, to.y + targetAt * scale];
      const [c, d] = [Math.max(span * scale, .5), Math.max(targetSpan * scale, .5)];
      const tint = states.length > 1 ? `color-mix(in srgb, ${colour(states[0])}, ${colour(states[states.length - 1])})` : colour(states[0]);
      const node = make(svg, "path", { class: "ribbon", style: `fill:${tint}`,
        d: `M${x1} ${a}C${middle} ${a} ${middle} ${b} ${x2} ${b}V${b + d}C${middle} ${b + d} ${middle} ${a + c} ${x1} ${a + c}Z` });
      node.dataset.bytes = moved;
      node.dataset.copies = copies;
      node.dataset.source = set.source;
      node.dataset.page = set.target_page;
      const block = Math.floor(at / from.page.bytes);
      node.dataset.tip = [
        `${page.name}: ${states.join(" + ")}`,
        copies > 1 ? `${many(copies, "copy", "copies")} of ${bytes(set.bytes)}, ${bytes(moved)} in all`
          : copies === 1 ? `one copy of ${bytes(moved)}` : `${bytes(moved)} of a copy that began in another layer`,
        `from prefill ${data.prefill.ranks[set.source].label}, block ${block + 1} of ${from.blocks}, byte ${number(at % from.page.bytes)}`,
        `to decode ${decodeRank().label}, byte ${number(targetAt)} of the page`,
        copies > 1 ? `${number(set.source_step || set.source_round)} bytes apart there, ${number(set.target_step || set.target_round)} here` : "",
      ].filter(Boolean).join("\n");
      ribbons.push(node);
    };
    const each = set.copies / total;
    if (total <= alone) {
      for (let i = 0; i < set.rounds; i += 1) for (let j = 0; j < set.count; j += 1) {
        ribbon(set.source_at + i * set.source_round + j * set.source_step,
          set.target_at + i * set.target_round + j * set.target_step,
          set.bytes, set.bytes, each, set.bytes);
      }
    } else {
      const span = (round, step) => (set.rounds - 1) * round + (set.count - 1) * step + set.bytes;
      ribbon(set.source_at, set.target_at, span(set.source_round, set.source_step), span(set.target_round, set.target_step),
        set.copies, set.bytes * total);
    }
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom}`);
  svg.style.height = `${bottom}px`;

  const drawn = { bytes: 0, copies: 0 };
  for (const node of ribbons) { drawn.bytes += Number(node.dataset.bytes); drawn.copies += Number(node.dataset.copies); }
  const group = data.decode.groups[chosen.group];
  const what = group.block === null ? "One sequence’s states" : `One block of ${many(moves().tokens, "token")}`;
  const text = $("copies-text");
  text.replaceChildren();
  if (!list.length) { text.textContent = "Nothing of this choice is copied."; return; }
  text.append(`${what} of group “${group.name}”${chosen.layer >= 0 ? `, layer “${decodePages()[chosen.layer].name}”` : ""}: `);
  html(text, "strong", { id: "drawn-bytes", "data-value": drawn.bytes }, bytes(drawn.bytes));
  text.append(" in ");
  html(text, "strong", { id: "drawn-copies", "data-value": drawn.copies }, many(drawn.copies, "copy", "copies"));
  text.append(` from ${many(columns.length, "prefill rank")}.`);
}

function activate(index) {
  if (!ribbons.length) return;
  if (active >= 0) ribbons[active].classList.remove("active");
  active = (index + ribbons.length) % ribbons.length;
  ribbons[active].classList.add("active");
  $("copies").classList.add("faded");
  $("detail").textContent = `Ribbon ${active + 1} of ${ribbons.length}. ${ribbons[active].dataset.tip}`;
}

