// An answer as its tokens, each with its probability: the less likely, the more color. The mouse, a tap or the
// arrow keys show what else the model could have said there. A token is [text, probability, [[text, probability],
// ...]], the likeliest first.

const STEPS = [0.9, 0.5, 0.1] // probabilities below which a token is odd, odder, oddest
const tokensOf = new WeakMap()

// Makes `target` show the tokens; tokens that it shows already stay.
export function show(target, tokens) {
  if (tokensOf.get(target) !== tokens) {
    target.replaceChildren()
    Object.assign(target, { className: "body tokens", tabIndex: 0 })
    target.setAttribute("role", "group")
    target.ariaLabel = "The answer's tokens: arrow keys move between them"
    tokensOf.set(target, tokens)
  }
  for (const [text, chance] of tokens.slice(target.childElementCount)) {
    const span = document.createElement("span")
    span.textContent = text
    span.dataset.odd = STEPS.filter((step) => chance < step).length
    target.append(span)
  }
}

const box = document.getElementById("odds")
let current = null

// Shows what could have stood in the place of a token; nothing for null.
function tell(span) {
  current?.classList.remove("current")
  current = span
  box.hidden = !span
  if (!span) return
  span.classList.add("current")
  const [text, chance, others] = tokensOf.get(span.parentElement)[[...span.parentElement.children].indexOf(span)]
  const rows = others.some(([other]) => other === text) ? others : [...others, [text, chance]]
  box.replaceChildren(...rows.map(([other, p]) => row(other, p, other === text)))
  const place = span.getBoundingClientRect(), { width, height } = box.getBoundingClientRect()
  const fits = place.bottom + height + 8 < innerHeight
  box.style.top = `${fits ? place.bottom + 4 : place.top - height - 4}px`
  box.style.left = `${Math.max(8, Math.min(place.left, document.documentElement.clientWidth - width - 8))}px`
}

function row(text, chance, isChosen) {
  const [line, name, share, bar] = ["div", "code", "span", "meter"].map((tag) => document.createElement(tag))
  name.textContent = JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣")
  share.textContent = `${(100 * chance).toFixed(1)} %`
  Object.assign(bar, { value: chance, ariaLabel: "Probability" })
  line.className = isChosen ? "chosen" : ""
  line.append(name, share, bar)
  return line
}

const spanAt = (target) => (target.parentElement?.matches(".tokens") ? target : null)

for (const event of ["mouseover", "click"]) document.addEventListener(event, ({ target }) => tell(spanAt(target)))
document.addEventListener("scroll", () => tell(null), true)
document.addEventListener("focusout", () => tell(null))
document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
  if (!step || !event.target.matches(".tokens")) return
  event.preventDefault()
  const spans = [...event.target.children], at = spans.indexOf(current)
  tell(spans[at < 0 ? 0 : at + step] ?? current)
})
