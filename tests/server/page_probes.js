// What the tests of the page ask it: what can be focused, what is, how much things stand out, and what is missing.
window.probes = {
  name: (e) => e.id || e.textContent.trim() || e.ariaLabel,

  isVisible: (e) => e.checkVisibility({ visibilityProperty: true }),

  focusable() {
    const place = document.querySelector("dialog[open]") ?? document
    return [...place.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
      .filter(this.isVisible)
      .map(this.name)
  },

  focused() {
    return this.name(document.activeElement)
  },

  // how much two colors differ, as WCAG 2 defines it; a color is a CSS value
  ratio(one, other) {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true })
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    const light = (color) => {
      canvas.fillStyle = color
      canvas.fillRect(0, 0, 1, 1)
      const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255))
      return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const [high, low] = [light(one), light(other)].sort((a, b) => b - a)
    return (high + 0.05) / (low + 0.05)
  },

  // the color behind an element; the page has no backgrounds that let others through
  ground(e) {
    const color = e ? getComputedStyle(e).backgroundColor : "white"
    return /^rgba\(.*, 0\)$/.test(color) ? this.ground(e.parentElement) : color
  },

  // [element, contrast] of everything that shows text, placeholders included
  contrasts() {
    const name = (e, text) => `${e.tagName}#${e.id}: ${text.trim().slice(0, 30)}`
    const shown = [...document.querySelectorAll("body *")].filter((e) => this.isVisible(e))
    const texts = shown
      .filter((e) => [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()))
      .map((e) => [name(e, e.textContent), this.ratio(getComputedStyle(e).color, this.ground(e))])
    const hints = shown
      .filter((e) => e.placeholder)
      .map((e) => [name(e, e.placeholder), this.ratio(getComputedStyle(e, "::placeholder").color, this.ground(e))])
    return [...texts, ...hints]
  },

  // [input, contrast] of the edges of everything that is written in or chosen from
  edges() {
    return [...document.querySelectorAll("input, textarea, select")].filter(this.isVisible).map((e) => {
      const framed = getComputedStyle(e).borderTopWidth === "0px" ? e.closest("form") : e
      return [e.id, this.ratio(getComputedStyle(framed).borderTopColor, this.ground(framed.parentElement))]
    })
  },

  // the contrast of what shows that an element has the focus: its outline, or the frame of the message box
  focusMark() {
    const e = document.activeElement
    const { outlineStyle, outlineWidth, outlineColor } = getComputedStyle(e)
    if (outlineStyle !== "none" && parseFloat(outlineWidth) >= 2) {
      return this.ratio(outlineColor, this.ground(e.parentElement))
    }
    const frame = e.closest("#composer")
    if (!frame || getComputedStyle(frame).boxShadow === "none") return 1
    return this.ratio(getComputedStyle(frame).borderTopColor, this.ground(frame.parentElement))
  },

  // what a reader of the document alone would miss
  problems() {
    const found = []
    const want = (is, what) => is || found.push(what)
    const all = (selector) => [...document.querySelectorAll(selector)]
    want(document.documentElement.lang, "a language")
    want(document.title.trim(), "a title")
    want(document.querySelector("meta[name=description]")?.content, "a description")
    want(/width=device-width/.test(document.querySelector("meta[name=viewport]")?.content), "a viewport")
    want(!/user-scalable|maximum-scale/.test(document.querySelector("meta[name=viewport]").content), "zoom")
    want(document.characterSet === "UTF-8" && document.compatMode === "CSS1Compat", "a modern document")
    for (const landmark of ["main", "h1", "main > header", "main > footer"]) {
      want(all(landmark).length === 1, `one ${landmark}`)
    }
    want(all("h1")[0]?.textContent.trim(), "a heading with words")
    const ids = all("[id]").map((e) => e.id)
    want(ids.length === new Set(ids).size, "ids that differ")
    for (const e of all("aside, nav, section, dialog")) {
      want(e.ariaLabel || document.getElementById(e.getAttribute("aria-labelledby")), `a name of ${e.tagName}`)
    }
    for (const e of all("input, select, textarea, meter")) want(e.labels.length || e.ariaLabel, `a label of ${e.id}`)
    for (const e of all("button, a, summary")) want(e.ariaLabel || e.textContent.trim(), `words on ${e.outerHTML}`)
    for (const e of all("img")) want(e.hasAttribute("alt") && e.width && e.height, `alt and size of ${e.src}`)
    for (const e of all("[aria-describedby], [aria-controls], label[for]")) {
      const id = e.getAttribute("aria-describedby") ?? e.getAttribute("aria-controls") ?? e.htmlFor
      want(document.getElementById(id), `an element ${id}`)
    }
    const levels = all("main :is(h1, h2, h3, h4)").filter(this.isVisible).map((e) => Number(e.tagName[1]))
    levels.forEach((level, i) => want(level <= (levels[i - 1] ?? 0) + 1, `a level before h${level}`))
    return found
  },

  // the words of elements, or what else a pattern finds, that stand on more than one line
  brokenWords(selector, pattern = /[\p{L}\p{N}_.,]+/gu) {
    const isCut = (node, { index, 0: word }) => {
      const range = document.createRange()
      range.setStart(node, index)
      range.setEnd(node, index + word.length)
      return new Set([...range.getClientRects()].map(({ top }) => Math.round(top))).size > 1
    }
    const texts = (e) => (e.nodeType === 3 ? [e] : [...e.childNodes].flatMap(texts))
    return [...document.querySelectorAll(selector)].flatMap(texts).flatMap((node) =>
      [...node.data.matchAll(pattern)].filter((match) => isCut(node, match)).map(([word]) => word),
    )
  },

  // how a text looks as the page's markdown, and the milliseconds that took
  async markdown(text) {
    const { show } = await import("/ui/static/markdown.js")
    const target = document.createElement("div")
    show(target, "something else before")
    const begin = performance.now()
    show(target, text)
    return [target.innerHTML, performance.now() - begin]
  },
}
