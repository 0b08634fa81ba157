// Colors for code: comments, strings, numbers and words of the language, by one pattern for each family of
// languages. Text becomes text of elements, nothing else; long code stays as it is.

const MOST = 50000 // characters
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`
const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`
const HASH = String.raw`#[^\n]*`
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`
const words = (text) => new Set(text.split(" "))

function family(comment, string, keywords) {
  return { pattern: new RegExp(`(${comment})|(${string})|(${NUMBER})|([A-Za-z_$][\\w$]*)`, "g"), keywords: words(keywords) }
}

const PYTHON = family(
  HASH,
  String.raw`[rRbBfFuU]{0,2}(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${DOUBLE}|${SINGLE})`,
  "False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield",
)
const SCRIPT = family(
  SLASHES,
  String.raw`${DOUBLE}|${SINGLE}|${"`"}(?:[^${"`"}\\]|\\.)*${"`"}?`,
  "async await break case catch class const continue default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void while yield",
)
const BRACES = family(
  SLASHES,
  String.raw`${DOUBLE}|'(?:[^'\\\n]|\\.){1,8}'`,
  "abstract as async auto await bool boolean break byte case catch char class const constexpr continue crate default defer delete do double else enum extends extern false final finally float fn for func go goto if impl implements import in include inline int interface let long loop match mod move mut namespace new nil null nullptr override package private protected pub public ref return self short signed sizeof static struct super switch template this throw throws trait true try type typedef typename union unsigned use using var virtual void volatile where while yield",
)
const SHELL = family(
  String.raw`(?<![\w$])#[^\n]*`,
  `${DOUBLE}|'[^']*'?`,
  "case do done elif else esac exit export fi for function if in local return set then unset until while",
)
const DATA = family(String.raw`#[^\n]*|\/\/[^\n]*`, `${DOUBLE}|${SINGLE}`, "true false null yes no on off")
const SQL = family(
  String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`,
  `${SINGLE}|${DOUBLE}`,
  "add all alter and as asc between by case create cross delete desc distinct drop else end exists from full group having if in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with",
)
SQL.ignoresCase = true
const MARKUP = {
  pattern: /(<!--[^]*?(?:-->|$))|("[^"\n]*"|'[^'\n]*')|(&\w+;)|(<\/?[A-Za-z][\w:-]*|\/?>)/g,
  keywords: { has: () => true },
}

const LANGUAGES = new Map()
for (const [names, one] of [
  ["python py python3 pycon", PYTHON],
  ["javascript js jsx typescript ts tsx mjs", SCRIPT],
  ["c h cpp c++ hpp cc java kotlin kt rust rs go golang csharp c# cs swift scala dart zig php", BRACES],
  ["bash sh shell zsh console", SHELL],
  ["ruby rb r julia perl", family(HASH, `${DOUBLE}|${SINGLE}`, "begin break case class def do else elsif end false for function if in module next nil null require return self then true unless until when while yield")],
  ["json jsonc json5 yaml yml toml ini", DATA],
  ["sql sqlite postgresql mysql", SQL],
  ["html xml svg vue", MARKUP],
]) for (const name of names.split(" ")) LANGUAGES.set(name, one)

// The nodes that show a code: text, and spans of the classes comment, string, number and word.
export function highlighted(code, language) {
  const one = LANGUAGES.get(language.toLowerCase())
  if (!one || code.length > MOST) return [code]
  const out = []
  let shown = 0
  for (const match of code.matchAll(one.pattern)) {
    const [text, comment, string, number, word] = match
    const isWord = word && one.keywords.has(one.ignoresCase ? word.toLowerCase() : word)
    const kind = comment ? "comment" : string ? "string" : number ? "number" : isWord ? "word" : ""
    if (!kind) continue
    const span = document.createElement("span")
    span.className = kind
    span.textContent = text
    out.push(code.slice(shown, match.index), span)
    shown = match.index + text.length
  }
  out.push(code.slice(shown))
  return out.filter(Boolean)
}
