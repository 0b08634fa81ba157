"""Texts that tokenizers get wrong."""

from hypothesis import strategies as st

PROSE = (
    "The capital of France is Paris. It's 105 km² in size, they'd say; I'LL CHECK: 2,102,650 in 2023!\n\n"
    "Naïve café owners don't re-use the café's façade — “quoted”, ‘single’, …and 50 % off.\r\n"
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n-1) + fib(n-2)  # O(2**n)\n"
    "\n\tprint(f'{fib(10)=}')\n"
    "日本語のテキスト、中文文本和 한국어 텍스트. Привет, мир! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก\n"
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs, 🇫🇷 France\n"
    "x = {'a': [1, 2.5e-3, None]}; a_b-c/d\\e <tag attr=\"v\">&amp;</tag>\n"
)

HARD_TEXTS = [
    "",
    " ",
    "  ",
    "   leading",
    "trailing   ",
    "a",
    "Hello world",
    "Hello  world   with    runs     of      spaces",
    "\n",
    "\n\n\n",
    " \n \n\n  \n",
    "\t\ttabs\t and\tspaces \t",
    "line\r\nline\r\r\n\n",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\u202fnarrow",
    "don't DON'T I'LL we've they'd it'S 'tis ''s 'ſ",
    "0 1 12 123 1234 12345 123456 1234567 3.14159 1,000,000 ½ Ⅷ ٣٤٥ ৩৪ 𝟘𝟙",
    "x1y22z333 a1 b22",
    "café cafe\u0301 nai\u0308ve A\u030a \u1e69 s\u0323\u0307 \u0344 e\u0301\u0302\u0303",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇫🇷🇩🇪 👩🏿‍🚀 \u2764\ufe0f \U0001f9d1\u200d\U0001f91d\u200d\U0001f9d1",
    "日本語のテキスト、中文文本，混合 English と 한국어 텍스트 カタカナ ｶﾀｶﾅ ﾊﾝｶｸ",
    "Привет, мир! Ελληνικά Հայերեն ქართული",
    "שלום עולם \u202bمرحبا\u202c بالعالم نستعليق ١٢٣",
    "नमस्ते दुनिया বাংলা தமிழ் ไทยไม่มีช่องว่าง ລາວ ខ្មែរ",
    "𝕳𝖊𝖑𝖑𝖔 𒀀𒁀 𐍈 \U0010fffd \ue000",
    "\x00\x01\x02\x03\x07\x08\x0b\x0c\x0e\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "\ufeffBOM \ufffe \uffff \ufdd0 \ufffd",
    "lone \ud83d surrogate \ude00 pair \ud83d\ude00 end\udfff",
    "a" * 3000,
    "ab" * 500 + " " + "漢" * 200 + "!" * 400 + " " * 300 + "\n" * 100 + "9" * 100,
    "supercalifragilisticexpialidocious" * 20,
    "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\dir\\file.txt",
    "if(x<=10&&y!=0){return x**2;}//comment\n\t\tfor i in range(10):\n\t\t    pass",
    "SELECT * FROM `t` WHERE a >= 1 AND b <> '';",
    "!!!???...---___***+++===<<<>>>|||~~~^^^$$$``` [] {} ()",
    "▁already▁marked▁ <0x0A> <0xFF> ĠGPT Ċ",
    "<|im_start|>user\nhi<|im_end|> <s>[INST] x [/INST]</s> <|endoftext|> <unk> <|eot_id|>",
    "CamelCaseAndXMLHttpRequest ABCdef aBcDeF ǅ ﬁ ß ẞ İı",
    "The\u2028line\u2029separators\u0085here",
    PROSE,
]

# everything str can hold, with more weight on what sits at the edges of words
any_text = st.text(
    st.one_of(
        st.sampled_from(list(" \n\r\t'sStTlLdD09_-.,!▁<>|éñ漢あ한א\u0301\u200d🏽👩\u00a0")),
        st.characters(),
    ),
    max_size=60,
)
