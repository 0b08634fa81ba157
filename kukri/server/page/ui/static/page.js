// The page: questions go out through htmx, answers come in through its SSE extension. conversations.js is the
// browser's memory, markdown.js turns text into nodes.
import * as store from "./conversations.js"
import * as images from "./images.js"
import * as library from "./library.js"
import { show } from "./markdown.js"
import * as tokens from "./tokens.js"
import * as versions from "./versions.js"

const $ = (id) => document.getElementById(id)
const messages = $("messages"), prompt = $("prompt"), stream = $("stream")
const ENDS = { length: "cut at the limit", stopped: "stopped", failed: "broken off" }
const N_LIKELIEST = 5 // tokens that are shown where one was chosen
const SETTINGS = "kukri.settings", ODDS = "kukri.probabilities", MODEL = "kukri.model", KEY = "kukri.key"

let chat = store.all()[0] ?? store.create()
let live = null // the answer that grows
let pending = [] // names of the images of the next message
let frame = 0 // in which the browser will show what came

// --- what is shown

function fill(template, index) {
  const element = $(template).content.cloneNode(true).firstElementChild
  element.dataset.index = index
  return element
}

function draw(message, index) {
  const article = fill(`${message.role}-message`, index)
  if (message.role === "user") {
    article.querySelector(".body").textContent = message.content
    article.querySelector(".images").replaceChildren(...(message.images ?? []).map((name) => picture(name)))
  } else drawAnswer(article, message)
  const { at, tails } = message.versions ?? { at: 0, tails: [null] }
  const box = article.querySelector(".versions")
  box.hidden = tails.length === 1
  box.children[0].disabled = at === 0
  box.children[1].textContent = `${at + 1}/${tails.length}`
  box.children[2].disabled = at === tails.length - 1
  return article
}

// An image as it is shown: small, with a button that takes it away if `remove` is given.
function picture(name, remove) {
  const figure = fill("picture", name)
  const shown = images.address(name)
  if (shown) figure.querySelector("img").src = shown
  figure.querySelector("button").hidden = !remove
  if (remove) figure.querySelector("button").addEventListener("click", remove)
  return figure
}

function drawPending() {
  const remove = (name) => () => {
    pending = pending.filter((one) => one !== name)
    drawPending()
  }
  $("pending").replaceChildren(...pending.map((name) => picture(name, remove(name))))
}

async function addImages(files) {
  const chosen = [...files].filter(({ type }) => type.startsWith("image/"))
  if (!chosen.length) return
  if (!("sees" in ($("sampling")?.dataset ?? {}))) return warn("This model does not accept images.")
  for (const file of chosen) pending.push(await images.add(file))
  drawPending()
  prompt.focus()
}

function drawAnswer(article, message) {
  const button = article.querySelector("[data-do=tokens]")
  button.hidden = !message.tokens
  button.textContent = message.isFormatted ? "Tokens" : "Formatted"
  if (message.tokens && !message.isFormatted) tokens.show(article.querySelector(".body"), message.tokens)
  else show(article.querySelector(".body"), message.content)
  article.querySelector("details").hidden = !message.thoughts
  article.querySelector(".thoughts").textContent = message.thoughts ?? ""
  article.querySelector(".actions").hidden = message === live
  const { n_generated: n, tokens_per_s: rate } = message.numbers ?? {}
  const facts = [n && `${n} tokens`, rate && `${Math.round(rate)} tokens/s`, ENDS[message.end]]
  article.querySelector(".stats").textContent = facts.filter(Boolean).join(" · ")
}

function drawMessages() {
  messages.replaceChildren(...chat.messages.map(draw))
  if (!chat.messages.length) messages.append(fill("welcome", -1))
}

function drawChat() {
  images.load(chat.messages).then((isNew) => isNew && drawChat())
  drawMessages()
  messages.scrollTop = messages.scrollHeight
  if (document.activeElement !== $("system")) $("system").value = chat.system
  say("")
  warn(chat.messages.at(-1)?.role === "user" ? "This message has no answer yet." : "")
  drawNumbers()
  drawList()
}

// Draws the answers again, whose formulas can be drawn now.
function redraw() {
  for (const article of messages.querySelectorAll(".assistant")) drawAnswer(article, chat.messages[article.dataset.index])
}

function drawList() {
  $("title").textContent = chat.title || "New chat"
  document.title = chat.title ? `${chat.title} · kukri` : "kukri"
  const items = store.all().filter(isWanted).map(({ id, title }) => {
    const item = fill("conversation", id)
    item.firstElementChild.textContent = title || "New chat"
    item.firstElementChild.ariaCurrent = String(id === chat.id)
    item.children[1].ariaLabel = `Rename ${title || "New chat"}`
    item.lastElementChild.ariaLabel = `Delete ${title || "New chat"}`
    return item
  })
  $("conversations").replaceChildren(...items)
}

// True if a conversation holds the text that is searched for.
function isWanted({ title, messages }) {
  const text = $("search").value.trim().toLowerCase()
  return !text || [title, ...messages.map(({ content }) => content)].some((one) => one?.toLowerCase().includes(text))
}

function drawNumbers() {
  const numbers = chat.messages.findLast((message) => message.numbers)?.numbers
  const used = numbers ? numbers.n_prompt + numbers.n_generated : 0
  const size = Number($("sampling")?.dataset.context ?? 0)
  Object.assign($("context"), { max: size || 1, low: size * 0.75, high: size * 0.9, value: used })
  $("context-text").textContent = size ? `${used.toLocaleString()} of ${size.toLocaleString()} tokens` : ""
  $("rate").textContent = numbers?.tokens_per_s ? `${Math.round(numbers.tokens_per_s)} tokens/s` : ""
}

function say(text) {
  $("status").textContent = text
}

function warn(text) {
  $("notice").hidden = !text
  $("notice").firstElementChild.textContent = text
}

// --- asking

function send(text, others, shown = []) {
  if (!text.trim() && !shown.length) return
  if (live) stop()
  messages.querySelector(".welcome")?.remove()
  chat.messages.push({ id: store.newId(), role: "user", content: text, versions: others, ...(shown.length && { images: shown }) })
  chat.title ||= (text.trim() || "An image").replace(/\s+/g, " ").slice(0, 60)
  messages.append(draw(chat.messages.at(-1), chat.messages.length - 1))
  ask()
}

// Asks for the answer to what the conversation ends with.
function ask(others) {
  if (!$("sampling") || lacksKey()) {
    keep()
    return begin()
  }
  live = { id: store.newId(), role: "assistant", content: "", thoughts: "", versions: others }
  chat.messages.push(live)
  messages.append(draw(live, chat.messages.length - 1))
  keep()
  messages.scrollTop = messages.scrollHeight
  setBusy(true)
  warn("")
  say("Answering …")
  htmx.trigger(stream, "ask")
}

const isEditing = () => messages.querySelector(".edit") !== null

// Stores the conversation, and shows what other tabs have added to it.
function keep(changes) {
  try {
    const hasMore = store.save(chat, changes, live)
    if (hasMore && !isEditing()) drawMessages()
    drawList()
  } catch {
    say("This browser's storage is full: delete a conversation to keep this one.")
  }
}

function question() {
  const body = { model: $("sampling").dataset.model, messages: [] }
  for (const { name, value } of inputs()) if (value !== "") body[name] = Number(value)
  if ($("probabilities").checked) body.top_logprobs = N_LIKELIEST
  if (chat.system.trim()) body.messages.push({ role: "system", content: chat.system })
  for (const { role, content, images: names } of chat.messages) {
    const shown = (names ?? []).map(images.address).filter(Boolean)
    const parts = shown.map((url) => ({ type: "image_url", image_url: { url } }))
    if (parts.length) body.messages.push({ role, content: [...parts, ...(content ? [{ type: "text", text: content }] : [])] })
    else if (content) body.messages.push({ role, content })
  }
  return body
}

const inputs = () => [...$("model").querySelectorAll("input")]

function setBusy(isBusy) {
  if (document.activeElement === $("stop") || document.activeElement === $("send")) prompt.focus()
  $("send").hidden = isBusy
  $("stop").hidden = !isBusy
  messages.ariaBusy = String(isBusy)
}

function grow({ thoughts, content, tokens: fresh, ...numbers }) {
  live.thoughts += thoughts
  live.content += content
  if (fresh) (live.tokens ??= []).push(...fresh)
  live.numbers = numbers
  frame ||= requestAnimationFrame(paint)
}

// Short prompts are read before anybody could see a number.
function tellProgress({ n_read: n, n_prompt: total }) {
  if (n < total) say(`Reading the conversation: ${n} of ${total} tokens`)
  else say("Answering …")
}

function paint() {
  cancelAnimationFrame(frame)
  frame = 0
  const isAtEnd = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 80
  drawAnswer(messages.lastElementChild, chat.messages.at(-1))
  drawNumbers()
  if (isAtEnd) messages.scrollTop = messages.scrollHeight
}

// The answer that grew is over: `end` is "stop", "length", "stopped" or "failed".
function finish(end, numbers = live.numbers) {
  htmx.swap(stream, "", { swapStyle: "innerHTML" }) // closes the stream
  Object.assign(live, { end, numbers })
  const isEmpty = !live.content && !live.thoughts && end !== "stop"
  live = null
  setBusy(false)
  paint()
  if (isEmpty) {
    chat.messages = versions.withoutLast(chat.messages)
    drawChat()
  }
  say(end === "failed" ? "" : end === "stopped" ? "Stopped" : "Answer complete")
  keep()
}

function stop() {
  htmx.trigger(stream, "htmx:abort")
  finish("stopped")
}

function fail(text) {
  if (live) finish("failed")
  warn(text)
}

htmx.defineExtension("chat-body", {
  encodeParameters: () => JSON.stringify(question()),
  onEvent(name, event) {
    if (name === "htmx:configRequest") event.detail.headers["Content-Type"] = "application/json"
  },
})

function on(name, react) {
  document.body.addEventListener(name, react)
}

// The header with the key, if there is one.
function authorization() {
  const key = sessionStorage.getItem(KEY)
  return key ? { Authorization: `Bearer ${key}` } : {}
}

on("htmx:configRequest", ({ detail }) => {
  Object.assign(detail.headers, authorization())
  const model = store.read(MODEL)
  if (model && detail.path === "ui/model") detail.parameters.name ??= model
})
on("htmx:sseBeforeMessage", (event) => {
  event.preventDefault() // nothing that a model wrote is swapped in as HTML
  if (!live) return
  const { message, finish_reason: reason, ...numbers } = JSON.parse(event.detail.data)
  if (event.detail.type === "delta") grow(numbers)
  else if (event.detail.type === "progress") tellProgress(numbers)
  else if (event.detail.type === "end") finish(reason, numbers)
  else fail(message)
})
on("htmx:sseError", () => live && fail("The connection was lost before the answer was complete."))
on("htmx:sendError", () => fail("The server cannot be reached."))
on("htmx:responseError", ({ detail: { xhr } }) => {
  if (xhr.status === 401) sessionStorage.removeItem(KEY)
  if (xhr.status === 404) localStorage.removeItem(MODEL) // it is not served any more
  let text = `The server answered with status ${xhr.status}.`
  try {
    text = JSON.parse(xhr.responseText).error.message
  } catch {
    // it is no error of this server's own: a proxy's, say
  }
  fail(xhr.status === 401 ? "The server does not accept this API key." : text)
})

// --- what buttons and keys do

const actions = {
  start: (button) => send(button.textContent),
  edit: (button) => edit(button.closest("article")),
  cancel: drawChat,
  copy: (button) => copy(chat.messages[button.closest("article").dataset.index].content, button),
  "copy-code": (button) => copy(button.closest("figure").querySelector("code").textContent, button),
  tokens(button) {
    const { index } = button.closest("article").dataset
    chat.messages[index].isFormatted = !chat.messages[index].isFormatted
    button.closest("article").replaceWith(draw(chat.messages[index], index))
    messages.querySelector(`[data-index="${index}"] [data-do=tokens]`).focus()
  },
  regenerate(button) {
    const index = Number(button.closest("article").dataset.index)
    const others = versions.begin(chat.messages, index)
    drawChat()
    ask(others)
  },
  earlier: (button) => turn(button, -1),
  later: (button) => turn(button, 1),
  open: (button) => open(store.all().find(({ id }) => id === button.parentElement.dataset.index)),
  rename(button) {
    const found = store.all().find(({ id }) => id === button.parentElement.dataset.index)
    const title = window.prompt("Name of this conversation", found.title)?.trim().slice(0, 200)
    if (!title) return
    if (found.id === chat.id) return keep({ title })
    store.save(found, { title })
    drawList()
  },
  delete(button) {
    const id = button.parentElement.dataset.index
    if (!confirm("Delete this conversation?")) return
    if (live && id === chat.id) stop()
    images.remove(store.all().find((one) => one.id === id)?.messages ?? [])
    store.remove(id)
    if (id === chat.id) open(store.all()[0])
    else drawList()
  },
  use: (button) => use(button.closest("li").dataset.name),
  pull: (button) => library.pull(button.closest("li"), authorization()),
  "cancel-pull": (button) => library.cancel(button.closest("li")),
}

// Chooses a model of the library; it may have to be loaded first.
function use(name) {
  $("library").close()
  $("settings").close()
  say(`Loading ${name} …`)
  htmx.ajax("GET", "ui/model", { target: "#model", swap: "innerHTML", values: { name } })
}

function turn(button, step) {
  if (live) stop()
  versions.turn(chat.messages, Number(button.closest("article").dataset.index), step)
  drawChat()
  keep()
}

function open(conversation) {
  if (live) stop()
  chat = conversation ?? store.create()
  drawChat()
  setMenu(false)
  prompt.focus()
}

function edit(article) {
  if (live) stop()
  const index = Number(article.dataset.index)
  const form = fill("edit-form", index)
  const input = form.querySelector("textarea")
  input.value = chat.messages[index].content
  article.replaceChildren(form)
  input.focus()
  form.addEventListener("submit", (event) => {
    event.preventDefault()
    if (!input.value.trim()) return
    const shown = chat.messages[index].images
    const others = versions.begin(chat.messages, index)
    drawChat()
    send(input.value, others, shown)
    prompt.focus()
  })
}

async function copy(text, button) {
  const label = button.textContent
  try {
    await navigator.clipboard.writeText(text)
    button.textContent = "Copied"
  } catch {
    button.textContent = "Not allowed" // by the browser: a page over plain HTTP, for one
  }
  setTimeout(() => (button.textContent = label), 1500)
}

// The conversation as a file of Markdown.
function download() {
  const heading = { user: "You", assistant: "Answer" }
  const system = chat.system.trim() ? [`## System\n\n${chat.system}`] : []
  const parts = chat.messages.map(({ role, content }) => `## ${heading[role]}\n\n${content}`)
  const text = [`# ${chat.title || "New chat"}`, ...system, ...parts].join("\n\n") + "\n"
  const address = URL.createObjectURL(new Blob([text], { type: "text/markdown" }))
  const name = (chat.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)
  Object.assign(document.createElement("a"), { href: address, download: `${name}.md` }).click()
  setTimeout(() => URL.revokeObjectURL(address), 1000)
}

function setMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen)
  $("menu").ariaExpanded = String(isOpen)
  if (isOpen) $("new-chat").focus()
}

on("click", ({ target }) => {
  const button = target.closest("[data-do]")
  if (button) actions[button.dataset.do](button)
})
on("keydown", (event) => {
  const isMessage = event.target.matches("#prompt, .edit textarea")
  if (event.key === "Enter" && isMessage && !event.shiftKey && !event.isComposing) {
    event.preventDefault()
    event.target.form.requestSubmit()
  } else if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (live) stop()
    else if (event.target.closest(".edit")) drawChat()
    setMenu(false)
  }
})
$("composer").addEventListener("submit", (event) => {
  event.preventDefault()
  const text = prompt.value
  prompt.value = ""
  const shown = pending
  pending = []
  drawPending()
  send(text, undefined, shown)
})
const press = (id, react) => $(id).addEventListener("click", react)
press("stop", stop)
press("retry", () => (chat.messages.at(-1)?.role === "user" ? ask() : begin()))
press("new-chat", () => open(null))
press("menu", () => setMenu(!document.body.classList.contains("menu-open")))
press("export", download)
press("add-images", () => $("files").click())
$("files").addEventListener("change", async ({ target }) => {
  await addImages(target.files)
  target.value = ""
})
prompt.addEventListener("paste", (event) => {
  if (![...event.clipboardData.files].some(({ type }) => type.startsWith("image/"))) return
  event.preventDefault()
  addImages(event.clipboardData.files)
})
on("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault())
on("drop", (event) => {
  if (!event.dataTransfer.files.length) return
  event.preventDefault() // the browser would leave the page to show the file
  addImages(event.dataTransfer.files)
})
$("search").addEventListener("input", drawList)
document.addEventListener("maths", () => chat.messages.some(({ role }) => role === "assistant") && redraw())
press("open-library", () => {
  if (!library.isBusy()) htmx.trigger($("models"), "open")
  $("library").showModal()
})
on("submit", (event) => {
  if (event.target.id !== "pull") return
  event.preventDefault()
  const row = document.importNode($("repository").content, true).firstElementChild
  row.dataset.name = row.querySelector("strong").textContent = event.target.elements.model.value.trim()
  event.target.reset()
  $("others").prepend(row)
  library.pull(row, authorization())
})
press("open-settings", () => $("settings").showModal())
$("theme").addEventListener("change", ({ target }) => {
  localStorage.setItem("kukri.theme", target.value)
  document.documentElement.dataset.theme = target.value
})
window.addEventListener("pagehide", () => live && stop())
window.addEventListener("storage", ({ key, newValue }) => {
  // another tab has written; an answer that grows here is brought together with that when it is over
  if (live || !store.isEntryOf(key, chat)) return drawList()
  if (newValue === null) return open(store.all()[0])
  if (store.follow(chat)) keep()
  if (!isEditing()) drawChat()
})

// --- settings, and the key

$("system").addEventListener("change", () => keep({ system: $("system").value }))
$("model").addEventListener("htmx:afterSwap", () => {
  const kept = store.read(SETTINGS) ?? {}
  for (const input of inputs()) input.value = kept[input.name] ?? input.value
  store.write(MODEL, $("sampling").dataset.model)
  $("model-name").textContent = $("sampling").dataset.model
  $("add-images").hidden = !("sees" in $("sampling").dataset)
  drawChat()
})
$("model").addEventListener("change", () => {
  store.write(SETTINGS, Object.fromEntries(inputs().map(({ name, value }) => [name, value])))
})
press("defaults", () => {
  store.write(SETTINGS, {})
  for (const input of inputs()) input.value = input.defaultValue
})
$("key-dialog").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, $("key").value)
  $("key").value = ""
  begin()
})
$("key-dialog").addEventListener("cancel", () => warn("This server requires an API key."))

// Asks what the server serves, and for the key that it may want first.
function begin() {
  if (lacksKey()) $("key-dialog").showModal()
  else htmx.trigger(document.body, "ready")
}

const lacksKey = () => "needsKey" in document.body.dataset && !sessionStorage.getItem(KEY)

$("probabilities").checked = store.read(ODDS) ?? false
$("probabilities").addEventListener("change", ({ target }) => store.write(ODDS, target.checked))
$("theme").value = document.documentElement.dataset.theme
drawChat()
document.addEventListener("DOMContentLoaded", begin) // after htmx has read the page
