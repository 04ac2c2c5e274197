// What the reader has chosen to look at.

// A layer of -1 is all of them; so is a source.
const chosen = { rank: 0, group: 0, layer: 0, source: -1, zoom: 1 };
const decodeRank = () => data.decode.ranks[chosen.rank];
const decodeFrame = () => data.decode.frames[decodeRank().frame];
const decodePages = () => decodeFrame().groups[chosen.group];
const sourceFrame = (rank) => data.prefill.frames[data.prefill.ranks[rank].frame];
const moves = () => data.moves[chosen.rank][chosen.group];
const chosenRibbons = () => moves().ribbons.filter((ribbon) => (chosen.layer < 0 || ribbon.target_page === chosen.layer)
  && (chosen.source < 0 || ribbon.source === chosen.source));

function options(select, entries, value) {
  select.replaceChildren();
  for (const [key, text] of entries) html(select, "option", { value: key }, text);
  select.value = String(value);
}

function fill() {
  options($("rank"), data.decode.ranks.map((rank, i) => [i, rank.label]), chosen.rank);
  const groups = data.decode.groups.map((group, i) => [i, `${group.name} (${many(decodeFrame().groups[i].length, "layer")})`])
    .filter(([i]) => decodeFrame().groups[i].length > 0);
  if (!groups.some(([i]) => i === chosen.group)) chosen.group = groups[0][0];
  options($("group"), groups, chosen.group);
  const pages = decodePages();
  if (chosen.layer >= pages.length) chosen.layer = 0;
  options($("layer"), [[-1, `all ${many(pages.length, "layer")}`], ...pages.map((page, i) => [i, page.name])], chosen.layer);
  const ranks = [...new Set(moves().ribbons.map((ribbon) => ribbon.source))].sort((a, b) => a - b);
  const sources = ranks.map((rank) => [rank, data.prefill.ranks[rank].label]);
  if (!sources.some(([rank]) => rank === chosen.source)) chosen.source = -1;
  options($("source"), [[-1, "all"], ...sources], chosen.source);
  options($("zoom"), [[1, "whole"], [8, "first eighth"], [64, "first 1/64"], [512, "first 1/512"], [4096, "first 1/4096"]], chosen.zoom);
}

// The page starts with the group that keeps the most states in a layer; where layers are many, with the
// first of them, which says more than all.
function start() {
  const states = (pages) => pages.length ? pages[0].states.length : 0;
  const counts = decodeFrame().groups.map(states);
  chosen.group = counts.indexOf(Math.max(...counts));
  chosen.layer = decodePages().length > 6 ? 0 : -1;
}
