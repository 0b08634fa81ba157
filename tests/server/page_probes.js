// What the tests of the page ask it: what can be focused, what is, and how much texts stand out.
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

  // [element, contrast ratio as WCAG 2 defines it] of everything that shows text
  contrasts() {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true })
    const rgba = (color) => {
      canvas.clearRect(0, 0, 1, 1)
      canvas.fillStyle = color
      canvas.fillRect(0, 0, 1, 1)
      return [...canvas.getImageData(0, 0, 1, 1).data]
    }
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255)
    const ground = (e) => {
      const color = e ? rgba(getComputedStyle(e).backgroundColor) : [255, 255, 255, 255]
      return color[3] === 255 ? color : ground(e.parentElement)
    }
    const ratio = (e) => {
      const [high, low] = [rgba(getComputedStyle(e).color), ground(e)].map(light).sort((a, b) => b - a)
      return (high + 0.05) / (low + 0.05)
    }
    return [...document.querySelectorAll("body *")]
      .filter((e) => this.isVisible(e) && [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()))
      .map((e) => [`${e.tagName}#${e.id}: ${e.textContent.trim().slice(0, 30)}`, ratio(e)])
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
