// Versions of a turn: what was there before an edit, with all that followed, stays alongside what took its place.
// A message with others in its place has `versions`: {at, tails}, where tails[i] are the messages from there
// on in version i, and null for the version that is shown, `at`.

// Takes the messages from an index on out of the conversation. Returns the versions of what comes instead.
export function begin(messages, index) {
  const tail = messages.splice(index)
  if (!tail.length) return undefined
  const versions = tail[0].versions ?? { at: 0, tails: [null] }
  delete tail[0].versions
  versions.tails[versions.at] = tail
  versions.at = versions.tails.push(null) - 1
  return versions
}

// The messages without the last one, an answer that is not over or has come to nothing: an earlier version of it
// comes back.
export function withoutLast(messages) {
  const kept = structuredClone(messages)
  const { versions } = kept.pop()
  if (!versions) return kept
  versions.tails.splice(versions.at, 1)
  bring(kept, kept.length, versions, versions.tails.length - 1)
  if (versions.tails.length === 1) delete kept.at(-1).versions
  return kept
}

// Shows another version of the message at an index, `step` places on.
export function turn(messages, index, step) {
  const versions = messages[index].versions
  const next = versions.at + step
  if (!(next in versions.tails)) return
  const tail = messages.splice(index)
  delete tail[0].versions
  versions.tails[versions.at] = tail
  bring(messages, index, versions, next)
}

function bring(messages, index, versions, at) {
  const tail = versions.tails[at]
  versions.tails[at] = null
  versions.at = at
  tail[0].versions = versions
  messages.splice(index, Infinity, ...tail)
}

// Every message, also in other versions.
export const all = (messages) =>
  messages.flatMap((message) => [message, ...(message.versions?.tails ?? []).flatMap((tail) => all(tail ?? []))])

// What two tabs have made of one conversation: what the first shows, and other messages of the second as versions.
export function merge(shown, others) {
  if (!shown.length || !others.length) return shown.length ? shown : others
  const at = shown[0].versions?.at ?? 0
  const tails = takeVersions(shown)
  for (const other of takeVersions(others)) {
    const i = tails.findIndex(([first]) => isSame(first, other[0]))
    if (i < 0) tails.push(other)
    else tails[i] = [{ ...other[0], ...tails[i][0] }, ...merge(tails[i].slice(1), other.slice(1))]
  }
  const merged = tails[at]
  if (tails.length > 1) merged[0].versions = { at, tails: tails.with(at, null) }
  return merged
}

// All versions of what begins with the first message, which says so no more.
function takeVersions(messages) {
  const { at, tails } = messages[0].versions ?? { at: 0, tails: [null] }
  delete messages[0].versions
  return tails.with(at, messages)
}

// Messages of earlier releases have no id.
const isSame = (a, b) => a.id === b.id && a.role === b.role && (a.id || a.content === b.content)
