// An attribution graph in circuit-tracer's JSON, as nodes by layer (rows) and position (columns). Files come from
// anywhere: numbers are checked before something is drawn, and texts are only ever shown as texts.

const NS = "http://www.w3.org/2000/svg"
const STEP = 14 // pixels from a node of a cell to the next
const PER_LINE = 12 // nodes of a cell side by side
const LEFT = 56 // pixels for the names of rows
const MOST_SPARE = 100 // pixels that a column gets for nothing
const N_LISTED = 15 // inputs and outputs in words
const N_LINES = 200 // and as lines
const MOST_NODES = 20000, MOST_TOKENS = 20000
const SHAPES = {
  feature: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  error: (r) => `M0,${-1.3 * r}L${1.3 * r},0L0,${1.3 * r}L${-1.3 * r},0Z`,
  token: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}Z`,
  logit: (r) => `M0,${-1.3 * r}L${1.3 * r},${r}H${-1.3 * r}Z`,
}

const kindOf = ({ feature_type: type }) =>
  type === "embedding" ? "token" : type === "logit" ? "logit" : type.endsWith("error") ? "error" : "feature"

// Throws what is wrong with a graph, in a line.
function check(graph) {
  const wrong = (what) => {
    throw new Error(`This is not an attribution graph in circuit-tracer's JSON: ${what}.`)
  }
  const { metadata, nodes, links } = graph ?? {}
  const words = metadata?.prompt_tokens
  if (!Array.isArray(nodes) || !Array.isArray(links)) wrong("it has no nodes and links")
  if (!Array.isArray(words) || !words.length || !words.every((word) => typeof word === "string")) {
    wrong("its metadata have no prompt_tokens")
  }
  if (nodes.length > MOST_NODES || words.length > MOST_TOKENS) {
    wrong(`it has ${nodes.length} nodes of ${words.length} tokens, and at most ${MOST_NODES} are drawn`)
  }
  for (const node of nodes) {
    if (typeof node?.node_id !== "string" || typeof node.feature_type !== "string") {
      wrong("a node has no node_id or feature_type")
    }
    const name = `the node ${node.node_id.slice(0, 40)}`
    if (!(Number.isInteger(node.ctx_idx) && node.ctx_idx >= 0 && node.ctx_idx < words.length)) {
      wrong(`${name} is at position ${node.ctx_idx} of ${words.length} tokens`)
    }
    const isBetween = !["token", "logit"].includes(kindOf(node))
    if (isBetween && !/^\d{1,3}$/.test(node.layer)) wrong(`${name} is in no layer`)
  }
  if (!nodes.length) wrong("it has no node")
}

function svg(name, facts, parent) {
  const made = document.createElementNS(NS, name)
  for (const [key, value] of Object.entries(facts)) made.setAttribute(key, value)
  parent.append(made)
  return made
}

function html(tag, facts, parent) {
  const made = Object.assign(document.createElement(tag), facts)
  parent.append(made)
  return made
}

const byWeight = (a, b) => Math.abs(b.weight) - Math.abs(a.weight)
const quoted = (text) => JSON.stringify(text)
const number = (value) => (Number.isFinite(value) ? value.toPrecision(3) : "?")

// Where everything stands: the width of each column follows its fullest cell, and so does a row's height; `room`
// is shared by columns that need less.
function layOut(nodes, nColumns, room) {
  const between = nodes.filter((node) => node.kind === "feature" || node.kind === "error")
  const top = 1 + Math.max(0, ...between.map(({ layer }) => Number(layer) + 1))
  const cells = new Map()
  for (const node of nodes) {
    node.row = node.kind === "token" ? 0 : node.kind === "logit" ? top : Number(node.layer) + 1
    const key = node.row * nColumns + node.column
    if (!cells.has(key)) cells.set(key, [])
    cells.get(key).push(node)
  }
  const widths = Array(nColumns).fill(48), heights = Array(top + 1).fill(20)
  for (const cell of cells.values()) {
    const [{ row, column }] = cell
    widths[column] = Math.max(widths[column], 20 + STEP * Math.min(cell.length, PER_LINE))
    heights[row] = Math.max(heights[row], 6 + STEP * Math.ceil(cell.length / PER_LINE))
  }
  const spare = (room - LEFT - 8 - widths.reduce((sum, width) => sum + width, 0)) / nColumns
  const starts = [LEFT]
  for (const width of widths) starts.push(starts.at(-1) + width + Math.max(0, Math.min(spare, MOST_SPARE)))
  const tops = Array(top + 1)
  let height = 8
  for (let row = top; row >= 0; row--) {
    tops[row] = height
    height += heights[row]
  }
  for (const cell of cells.values()) {
    cell.sort((a, b) => a.influence - b.influence)
    cell.forEach((node, i) => {
      node.x = starts[node.column] + 10 + STEP * (i % PER_LINE)
      node.y = tops[node.row] + 10 + STEP * Math.floor(i / PER_LINE)
    })
  }
  return { starts, tops, heights, height, width: starts.at(-1) + 8 }
}

// Writes into `place` which shape stands for what.
export function explain(place) {
  place.classList.add("kinds")
  for (const [kind, shape] of Object.entries(SHAPES)) {
    const entry = html("span", {}, place)
    const box = svg("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, entry)
    svg("path", { class: `node ${kind}`, d: shape(5) }, box)
    entry.append(kind)
  }
}

// Draws a graph into `map`, and what is known of the chosen node into `facts`. Throws an Error in a line.
export function view(graph, map, facts) {
  check(graph)
  const words = graph.metadata.prompt_tokens
  const nodes = graph.nodes.map((given) => ({
    id: given.node_id,
    kind: kindOf(given),
    column: given.ctx_idx,
    layer: given.layer,
    influence: Number.isFinite(given.influence) ? given.influence : 1,
    label: typeof given.clerp === "string" ? given.clerp : "",
    tokens: Array.isArray(given.top_tokens) ? given.top_tokens.filter((text) => typeof text === "string") : [],
    activation: given.activation,
    probability: given.token_prob,
    into: [],
    out: [],
  }))
  const byId = new Map(nodes.map((node) => [node.id, node]))
  for (const { source, target, weight } of graph.links) {
    const from = byId.get(source), to = byId.get(target)
    if (!from || !to || !Number.isFinite(weight)) continue
    from.out.push({ node: to, weight })
    to.into.push({ node: from, weight })
  }
  for (const { into, out } of nodes) [into, out].forEach((links) => links.sort(byWeight))
  const place = layOut(nodes, words.length, map.clientWidth)
  const sheet = document.createElement("div")
  sheet.className = "sheet"
  Object.assign(sheet.style, { width: `${place.width}px` })
  const picture = svg("svg", { width: place.width, height: place.height, "aria-hidden": "true" }, sheet)
  place.tops.forEach((top, row) => {
    if (row % 2) svg("rect", { class: "odd", y: top, width: place.width, height: place.heights[row] }, picture)
  })
  const lines = svg("g", {}, picture)
  const most = Math.max(...nodes.map(({ influence }) => 1 - influence), 1e-9)
  for (const node of nodes) {
    const size = 3.5 + (2.5 * (1 - node.influence)) / most
    const facts = { d: SHAPES[node.kind](size), transform: `translate(${node.x} ${node.y})` }
    node.shape = svg("path", facts, picture)
  }
  place.tops.forEach((top, row) => {
    const band = html("div", { className: "row", ariaHidden: "true" }, sheet)
    band.style.top = `${top}px`
    html("span", { textContent: row === 0 ? "tokens" : row === place.tops.length - 1 ? "logits" : row - 1 }, band)
  })
  const strip = html("div", { className: "words", ariaHidden: "true" }, sheet)
  words.forEach((word, i) => {
    const span = html("span", { textContent: word, title: word }, strip)
    Object.assign(span.style, { left: `${place.starts[i]}px`, width: `${place.starts[i + 1] - place.starts[i] - 4}px` })
  })
  const hint = html("div", { className: "hint", hidden: true }, sheet)
  map.replaceChildren(sheet)

  const nameOf = ({ kind, id, label, layer, column }) => {
    if (kind === "token") return `token ${quoted(words[column])}`
    if (kind === "logit") return label || "logit"
    if (kind === "error") return `error of layer ${layer} on ${quoted(words[column])}`
    const feature = /^\d+_(\d+)_\d+$/.exec(id)?.[1] ?? id
    return `${label || "feature"} ${layer}/${feature} on ${quoted(words[column])}`
  }
  let chosen = null

  function choose(node) {
    chosen = node
    const near = new Set([node, ...node.into.map((link) => link.node), ...node.out.map((link) => link.node)])
    for (const other of nodes) {
      const more = other === node ? " chosen" : near.has(other) ? "" : " far"
      other.shape.setAttribute("class", `node ${other.kind}${more}`)
    }
    const links = [...node.into, ...node.out].sort(byWeight).slice(0, N_LINES)
    const largest = Math.abs(links[0]?.weight ?? 1)
    lines.replaceChildren()
    for (const { node: other, weight } of links.reverse()) {
      const share = Math.abs(weight) / largest, ends = { x1: node.x, y1: node.y, x2: other.x, y2: other.y }
      const look = { class: weight > 0 ? "up" : "down", "stroke-width": 0.6 + 3 * share, opacity: 0.25 + 0.75 * share }
      svg("line", { ...ends, ...look }, lines)
    }
    tell(node)
  }

  function tell(node) {
    facts.replaceChildren()
    html("h2", { textContent: nameOf(node), role: "status" }, facts)
    const known = []
    if (Number.isFinite(node.activation)) known.push(`activation ${number(node.activation)}`)
    if (node.kind === "logit") known.push(`probability ${number(node.probability)}`)
    known.push(`position ${node.column}`)
    html("p", { textContent: known.join(" · ") }, facts)
    if (node.tokens.length) html("p", { textContent: `writes for ${node.tokens.map(quoted).join(" ")}` }, facts)
    list("Inputs", node.into)
    list("Outputs", node.out)
  }

  function list(title, links) {
    const n = Math.min(links.length, N_LISTED)
    html("h3", { textContent: n ? `${title}, ${n} of ${links.length}` : `No ${title.toLowerCase()}` }, facts)
    const made = html("ol", {}, facts)
    for (const { node, weight } of links.slice(0, n)) {
      const button = html("button", { type: "button" }, html("li", {}, made))
      const written = node.tokens.length ? `: ${node.tokens.slice(0, 3).map(quoted).join(" ")}` : ""
      html("span", { textContent: nameOf(node) + written }, button)
      const [className, sign] = weight > 0 ? ["up", "+"] : ["down", "−"]
      html("span", { className, textContent: sign + number(Math.abs(weight)) }, button)
      button.addEventListener("click", () => {
        choose(node)
        reveal(node)
        map.focus()
      })
    }
  }

  // The node at a point of the page, if one is near.
  function at({ clientX, clientY }) {
    const box = picture.getBoundingClientRect(), x = clientX - box.left, y = clientY - box.top
    let best = null, least = STEP ** 2
    for (const node of nodes) {
      const distance = (node.x - x) ** 2 + (node.y - y) ** 2
      if (distance < least) [best, least] = [node, distance]
    }
    return best
  }

  function show(node) {
    hint.hidden = !node
    if (!node) return
    hint.replaceChildren()
    html("strong", { textContent: nameOf(node) }, hint)
    if (node.tokens.length) html("span", { textContent: node.tokens.map(quoted).join(" ") }, hint)
    const { clientWidth, scrollLeft, scrollTop } = map, { offsetWidth: width, offsetHeight: height } = hint
    const above = node.y - height - 10
    hint.style.left = `${Math.max(scrollLeft + 4, Math.min(node.x + 8, scrollLeft + clientWidth - width - 4))}px`
    hint.style.top = `${above < scrollTop ? node.y + 10 : above}px`
  }

  function reveal({ x, y }) {
    const { clientWidth: width, clientHeight: height, scrollLeft: left, scrollTop: top } = map
    if (x < left + LEFT + 10 || x > left + width - 20) map.scrollLeft = x - width / 2
    if (y < top + 10 || y > top + height - 50) map.scrollTop = y - height / 2
  }

  function step(key) {
    const isAside = key === "ArrowLeft" || key === "ArrowRight"
    const sign = key === "ArrowRight" || key === "ArrowUp" ? 1 : -1
    const order = (node) => (isAside ? node.x * 1e4 + node.y : node.row)
    const candidates = isAside ? nodes.filter((node) => node.row === chosen.row) : nodes
    const after = candidates.filter((node) => sign * (order(node) - order(chosen)) > 0)
    const next = Math.min(...after.map((node) => sign * order(node)))
    const first = after.filter((node) => sign * order(node) === next)
    return first.sort((a, b) => Math.abs(a.x - chosen.x) - Math.abs(b.x - chosen.x))[0]
  }

  map.onmousemove = (event) => show(at(event))
  map.onmouseleave = () => show(null)
  map.onblur = () => show(null)
  map.onclick = (event) => {
    const node = at(event)
    if (node) choose(node)
  }
  map.onkeydown = (event) => {
    if (!event.key.startsWith("Arrow")) return
    event.preventDefault()
    const node = step(event.key)
    if (!node) return
    choose(node)
    reveal(node)
    show(node)
  }
  const logits = nodes.filter(({ kind }) => kind === "logit")
  choose(logits.sort((a, b) => b.probability - a.probability)[0] ?? nodes[0])
  reveal(chosen)
}
