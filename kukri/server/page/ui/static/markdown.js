// Markdown to DOM nodes. Every character of the text ends up as text of an element made here: nothing is
// parsed as HTML, images are not loaded, links lead to http, https and mailto alone. Patterns are bounded, so
// that no text takes long.
import { highlighted } from "./highlight.js"
import { formula } from "./maths.js"

const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,}) *([\w+#.-]{0,30})/
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/
const LINE = /^ {0,3}([-*_])( *\1){2,} *$/
const QUOTE = /^ {0,3}> ?(.*)$/
const DEEPEST = 6
const SCHEMES = ["http:", "https:", "mailto:"]

// Makes `target` show the text; nodes that do not change stay, with what is selected in them.
export function show(target, text) {
  const fresh = [...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0).childNodes]
  fresh.forEach((node, i) => {
    const old = target.childNodes[i]
    if (!old) target.append(node)
    else if (!old.isEqualNode(node)) old.replaceWith(node)
  })
  while (target.childNodes.length > fresh.length) target.lastChild.remove()
}

function make(tag, children, properties = {}) {
  const element = document.createElement(tag)
  element.append(...children)
  return Object.assign(element, properties)
}

function blocks(lines, depth) {
  const out = document.createDocumentFragment()
  for (let i = 0; i < lines.length; ) {
    const line = lines[i]
    let match
    if (!line.trim()) i++
    else if ((match = FENCE.exec(line))) i = code(lines, i + 1, match, out)
    else if ((match = HEADING.exec(line))) {
      // the page has h1 and h2, so headings of an answer begin below
      out.append(make(`h${Math.min(match[1].length + 2, 6)}`, [inline(match[2].replace(/ #+$/, ""))]))
      i++
    } else if (LINE.test(line)) {
      out.append(make("hr", []))
      i++
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const inner = []
      for (; i < lines.length && (match = QUOTE.exec(lines[i])); i++) inner.push(match[1])
      out.append(make("blockquote", [blocks(inner, depth + 1)]))
    } else if (ITEM.test(line) && depth < DEEPEST) i = list(lines, i, depth, out)
    else if (isTable(line, lines[i + 1])) i = table(lines, i, out)
    else {
      const first = i++
      while (i < lines.length && lines[i].trim() && !begins(lines, i)) i++
      out.append(make("p", [inline(lines.slice(first, i).join("\n").trim())]))
    }
  }
  return out
}

function begins(lines, i) {
  return [ITEM, FENCE, HEADING, LINE, QUOTE].some((pattern) => pattern.test(lines[i])) || isTable(lines[i], lines[i + 1])
}

function code(lines, first, [, fence, language], out) {
  let i = first
  const isEnd = (line) => line.startsWith(fence) && !line.replaceAll(fence[0], "")
  while (i < lines.length && !isEnd(lines[i].trim())) i++
  const copy = make("button", ["Copy"], { type: "button", className: "quiet" })
  copy.dataset.do = "copy-code"
  const pre = make("pre", [make("code", highlighted(lines.slice(first, i).join("\n"), language))], { tabIndex: 0 })
  out.append(make("figure", [make("figcaption", [make("span", [language || "code"]), copy]), pre]))
  return i + 1
}

function list(lines, i, depth, out) {
  const [, { length: indent }, marker] = ITEM.exec(lines[i])
  const isOrdered = /\d/.test(marker)
  const element = make(isOrdered ? "ol" : "ul", [], isOrdered ? { start: parseInt(marker, 10) } : {})
  for (let match; i < lines.length && (match = ITEM.exec(lines[i])); ) {
    if (match[1].length !== indent || /\d/.test(match[2]) !== isOrdered) break
    const inner = [match[3]]
    const offset = lines[i].length - match[3].length
    for (i++; i < lines.length; i++) {
      const next = notBlank(lines, i)
      const deep = next < lines.length ? lines[next].search(/\S/) : -1
      if (deep <= indent && (next > i || begins(lines, i))) break
      if (next > i) inner.push("")
      i = next
      inner.push(lines[i].slice(Math.min(deep, offset)))
    }
    element.append(make("li", [blocks(inner, depth + 1)]))
    const next = notBlank(lines, i)
    if (next < lines.length && ITEM.test(lines[next])) i = next
  }
  out.append(element)
  return i
}

function notBlank(lines, i) {
  while (i < lines.length && !lines[i].trim()) i++
  return i
}

// The cells of a row. A bar after a backslash is text, in code too.
function cells(line) {
  const found = [""]
  for (const [piece] of line.trim().matchAll(/\\.|[^\\|]+|[^]/g)) {
    if (piece === "|") found.push("")
    else found[found.length - 1] += piece
  }
  if (!found[0]) found.shift()
  if (!found.at(-1)) found.pop()
  return found.map((cell) => cell.trim().replaceAll("\\|", "|"))
}

function isTable(line, next) {
  if (!line.includes("|") || !next?.includes("|") || !next.includes("-")) return false
  return cells(next).every((cell) => /^:?-+:?$/.test(cell))
}

function table(lines, i, out) {
  const sides = cells(lines[i + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""))
  const row = (line, tag) => {
    const texts = cells(line)
    while (texts.length < sides.length) texts.push("")
    return make("tr", texts.map((text, j) => make(tag, [inline(text)], sides[j] && { className: sides[j] })))
  }
  const head = make("thead", [row(lines[i], "th")])
  const body = make("tbody", [])
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) body.append(row(lines[i], "td"))
  out.append(make("div", [make("table", [head, body])], { className: "table", tabIndex: 0 }))
  return i
}

// [pattern, what becomes of a match; null leaves it as text]. Within a word, `_` is no emphasis.
const wrap = (tag) => (match, depth) => make(tag, [inline(match[1], depth + 1)])
const RULES = [
  [/\$\$([^$]{1,2000})\$\$/y, (match) => formula(match[1].trim(), true)],
  [/\\\[([^]{1,2000}?)\\\]/y, (match) => formula(match[1].trim(), true)],
  [/\\\(([^]{1,2000}?)\\\)/y, (match) => formula(match[1].trim(), false)],
  [/\$(?=[^\s$])((?:[^$\\\n]|\\[^\n]){1,500})(?<!\s)\$(?!\d)/y, (match) => formula(match[1], false)],
  [/\\([!-/:-@[-`{-~])/y, (match) => match[1]],
  [/``((?:[^`]|`(?!`)){1,4000})``/y, (match) => make("code", [match[1].trim()])],
  [/`([^`]{1,4000})`/y, (match) => make("code", [match[1]])],
  [/!\[([^\]]{0,300})\]\(([^()\s]{1,2000})\)/y, (match) => link(match[2], match[1] || match[2])],
  [/\[([^\]]{1,500})\]\(((?:[^()\s]|\([^()\s]{0,200}\)){1,2000})(?: +"[^"]{0,300}")?\)/y, (match) => link(match[2], match[1])],
  [/(https?:\/\/[^\s<>"'`*|\\]{0,2000}[^\s<>"'`*|\\.,;:!?)\]}])/y, (match) => link(match[1], match[1])],
  [/\*\*(?=\S)((?:[^*]|\*(?!\*)){1,500}?\*?)\*\*/y, wrap("strong")],
  [/\*(?=[^\s*])([^*]{1,500})\*/y, wrap("em")],
  [/(?<!\w)__(?=\S)((?:[^_]|_(?!_)){1,500}?)__(?!\w)/y, wrap("strong")],
  [/(?<!\w)_(?=[^\s_])([^_]{1,500})_(?!\w)/y, wrap("em")],
  [/~~(?=\S)([^~]{1,500})~~/y, wrap("del")],
  [/\n/y, () => make("br", [])],
]

function inline(text, depth = 0) {
  const out = document.createDocumentFragment()
  const special = /[\\`!\[*_~\n$]|https?:/g
  let shown = 0
  for (let found; depth < DEEPEST && (found = special.exec(text)); ) {
    for (const [pattern, become] of RULES) {
      pattern.lastIndex = found.index
      const match = pattern.exec(text)
      const made = match && become(match, depth)
      if (!made) continue
      out.append(text.slice(shown, found.index), made)
      shown = special.lastIndex = found.index + match[0].length
      break
    }
  }
  out.append(text.slice(shown))
  out.normalize()
  return out
}

function link(address, label) {
  const url = URL.parse(address)
  if (!url || !SCHEMES.includes(url.protocol)) return null
  const rel = "noopener noreferrer nofollow"
  return make("a", [label], { href: url.href, title: url.href, target: "_blank", rel })
}
