// Images that messages show: the files are in this browser's IndexedDB, by names that the messages hold; those
// that have been seen are in memory, as data URLs.
import { all } from "./versions.js"

const known = new Map()
let opened = null

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("kukri", 1)
    request.onupgradeneeded = () => request.result.createObjectStore("images")
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  })
  return opened
}

async function run(mode, act) {
  const images = (await database()).transaction("images", mode).objectStore("images")
  const request = act(images)
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  })
}

// Keeps a file and returns its name. A browser that keeps nothing has it until the page is left.
export async function add(file) {
  const address = await new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result)
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(file)
  })
  const name = crypto.getRandomValues(new Uint32Array(4)).join("-")
  known.set(name, address)
  await run("readwrite", (images) => images.put(address, name)).catch(() => null)
  return name
}

// The data URL of an image in memory; undefined for one that was not loaded, or is lost.
export const address = (name) => known.get(name)

// Brings the images of a conversation to memory. True if any came.
export async function load(messages) {
  const missing = names(messages).filter((name) => !known.has(name))
  const found = await Promise.all(missing.map((name) => run("readonly", (images) => images.get(name)).catch(() => null)))
  missing.forEach((name, i) => found[i] && known.set(name, found[i]))
  return found.some(Boolean)
}

// Forgets the images of a conversation.
export async function remove(messages) {
  for (const name of names(messages)) {
    known.delete(name)
    await run("readwrite", (images) => images.delete(name)).catch(() => null)
  }
}

// The names of all images of messages, also in other versions.
const names = (messages) => all(messages).flatMap(({ images }) => images ?? [])
