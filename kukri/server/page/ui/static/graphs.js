// The page of attribution graphs: asks the server for one, or opens a file; the viewer draws it.
import { explain, view } from "../viewer/graph.js"
import { read } from "./conversations.js"

const $ = (id) => document.getElementById(id)
const prompt = $("prompt"), [map, facts] = [".map", ".facts"].map((one) => document.querySelector(one))
const MOST_BYTES = 300e6 // of a file
let shown = null // the graph, as a Blob
let graph = null // and parsed
let abort = null // ends the request that waits for a graph

function warn(text) {
  $("notice").hidden = !text
  $("notice").firstElementChild.textContent = text
}

// Shows the graph of a Blob, or what is wrong with it in a line.
async function open(blob, name) {
  warn("")
  try {
    if (blob.size > MOST_BYTES) throw new Error(`${name} has more than ${MOST_BYTES / 1e6} MB.`)
    let given
    try {
      given = JSON.parse(await blob.text())
    } catch {
      throw new Error(`${name} is not JSON.`)
    }
    document.querySelector(".welcome").hidden = true
    document.querySelector(".graph").hidden = false
    view(given, map, facts)
    graph = given
    shown = blob
    $("share").value = 1
    const { prompt: text, scan, prompt_tokens: words, slug } = graph.metadata
    $("title").textContent = text || words.join("")
    $("title").title = [slug, scan].filter(Boolean).join(" · ")
    $("kinds").hidden = $("save").hidden = $("shares").hidden = false
    const counts = [graph.nodes, graph.links].map(({ length }) => length.toLocaleString())
    $("status").textContent = `${counts[0]} nodes, ${counts[1]} links`
  } catch (error) {
    if (!shown) {
      document.querySelector(".welcome").hidden = false
      document.querySelector(".graph").hidden = true
    }
    warn(error.message)
  }
}

// Leaves out the features and errors without which the others have a share of the influence.
function prune() {
  const share = $("share").valueAsNumber
  const isKept = ({ influence, feature_type: type }) => type === "embedding" || type === "logit" || !(influence > share)
  view({ ...graph, nodes: share < 1 ? graph.nodes.filter(isKept) : graph.nodes }, map, facts)
}

async function make() {
  const key = sessionStorage.getItem("kukri.key")
  if ("needsKey" in document.body.dataset && !key) {
    return warn("This server requires an API key: enter it on the chat page first.")
  }
  const started = Date.now()
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) }
  let share = ""
  const tell = () => ($("status").textContent = `Tracing … ${share}${Math.round((Date.now() - started) / 1000)} s`)
  const look = async () => {
    tell()
    const { progress } = await (await fetch("../check-busy", { headers })).json()
    share = progress ? `${Math.floor((100 * progress.done) / progress.total)}%, ` : ""
  }
  const ticks = setInterval(() => look().catch(() => {}), 1000)
  abort = new AbortController()
  setBusy(true)
  warn("")
  tell()
  try {
    const body = { prompt: prompt.value, max_feature_nodes: $("features").valueAsNumber || 0, compress: true }
    const model = read("kukri.model")
    if (model) body.model_id = model
    const options = { method: "POST", headers, body: JSON.stringify(body), signal: abort.signal }
    const answer = await fetch("../generate-graph", options)
    if (!answer.ok) throw new Error((await answer.json()).error.message)
    await open(await answer.blob(), "The server's graph")
  } catch (error) {
    $("status").textContent = ""
    warn(abort.signal.aborted ? "Cancelled." : error.message)
  } finally {
    clearInterval(ticks)
    abort = null
    setBusy(false)
  }
}

function setBusy(isBusy) {
  $("make").hidden = isBusy
  $("stop").hidden = !isBusy
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault()
  if (!abort) make()
})
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return
  event.preventDefault()
  prompt.form.requestSubmit()
})
$("stop").addEventListener("click", () => abort?.abort())
$("open").addEventListener("click", () => $("file").click())
$("file").addEventListener("change", ({ target }) => {
  if (target.files.length) open(target.files[0], target.files[0].name)
  target.value = ""
})
document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault())
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return
  event.preventDefault() // the browser would leave the page to show the file
  open(event.dataTransfer.files[0], event.dataTransfer.files[0].name)
})
$("save").addEventListener("click", () => {
  const address = URL.createObjectURL(shown)
  Object.assign(document.createElement("a"), { href: address, download: "graph.json" }).click()
  setTimeout(() => URL.revokeObjectURL(address), 1000)
})
$("share").addEventListener("input", prune)
explain($("kinds"))
