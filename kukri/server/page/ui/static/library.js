// Downloads of the library. Each is a request to /api/pull, whose answer tells how far it is; to cancel it is to
// leave: the server ends a download that nobody waits for.

const running = new Map() // AbortControllers by the names of the models

export const isBusy = () => running.size > 0

export const cancel = (row) => running.get(row.dataset.name)?.abort()

// Downloads the model that a row names, and shows in the row how that goes.
export async function pull(row, headers) {
  const name = row.dataset.name, button = row.querySelector("button"), abort = new AbortController()
  if (running.has(name)) return
  running.set(name, abort)
  const bar = Object.assign(document.createElement("progress"), { max: 1, ariaLabel: `Download of ${name}` })
  const said = Object.assign(document.createElement("p"), { className: "said", textContent: "Asking …" })
  said.role = "status"
  row.querySelectorAll("progress, .said").forEach((old) => old.remove())
  row.append(bar, said)
  give(button, "cancel-pull", "Cancel")
  try {
    for await (const { error, completed, total } of lines("api/pull", { model: name }, headers, abort.signal)) {
      if (error) throw new Error(error)
      if (completed === undefined) continue
      if (total) Object.assign(bar, { max: total, value: completed })
      said.textContent = total ? `${size(completed)} of ${size(total)}` : size(completed)
    }
    said.remove()
    give(button, "use", "Use")
  } catch (error) {
    said.textContent = abort.signal.aborted ? "Cancelled." : error.message
    said.classList.toggle("wrong", !abort.signal.aborted)
    give(button, "pull", "Download")
  } finally {
    bar.remove()
    running.delete(name)
  }
}

function give(button, action, label) {
  button.dataset.do = action
  button.textContent = label
}

const size = (n) => (n < 1e8 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`)

// The lines of a response, each read as JSON.
async function* lines(path, body, headers, signal) {
  const options = { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, signal }
  const response = await fetch(path, { ...options, body: JSON.stringify(body) })
  if (!response.ok) throw new Error((await response.json()).error)
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  let text = ""
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (text + part.value).split("\n")
    text = whole.pop()
    yield* whole.map((line) => JSON.parse(line))
  }
}
