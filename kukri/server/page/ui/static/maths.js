// Formulas, drawn by KaTeX, which is fetched when the first one appears. Until then, and where it cannot
// read a formula, its text is shown. KaTeX makes nodes; links, images and macros that grow are off.

const LIMITS = { trust: false, strict: "ignore", maxSize: 20, maxExpand: 200 }
let asked = false

export function formula(text, isDisplay) {
  const element = document.createElement("span")
  element.className = isDisplay ? "maths display" : "maths"
  element.textContent = text
  if (!window.katex) fetchKatex()
  else
    try {
      window.katex.render(text, element, { ...LIMITS, displayMode: isDisplay })
    } catch {
      element.textContent = text // no formula that it knows
    }
  return element
}

// A `maths` event tells the page to draw its formulas again.
function fetchKatex() {
  if (asked) return
  asked = true
  const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: "ui/vendor/katex.min.css" })
  const script = Object.assign(document.createElement("script"), { src: "ui/vendor/katex.min.js" })
  script.addEventListener("load", () => document.dispatchEvent(new Event("maths")))
  document.head.append(style, script)
}
