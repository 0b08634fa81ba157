"""The English names of Whisper's languages, by which OpenAI's API names the language of a sound."""

_CODES_AND_NAMES = """
af afrikaans am amharic ar arabic as assamese az azerbaijani ba bashkir be belarusian bg bulgarian
bn bengali bo tibetan br breton bs bosnian ca catalan cs czech cy welsh da danish de german el greek
en english es spanish et estonian eu basque fa persian fi finnish fo faroese fr french gl galician
gu gujarati ha hausa haw hawaiian he hebrew hi hindi hr croatian ht haitian_creole hu hungarian hy
armenian id indonesian is icelandic it italian ja japanese jw javanese ka georgian kk kazakh km
khmer kn kannada ko korean la latin lb luxembourgish ln lingala lo lao lt lithuanian lv latvian mg
malagasy mi maori mk macedonian ml malayalam mn mongolian mr marathi ms malay mt maltese my myanmar
ne nepali nl dutch nn nynorsk no norwegian oc occitan pa punjabi pl polish ps pashto pt portuguese
ro romanian ru russian sa sanskrit sd sindhi si sinhala sk slovak sl slovenian sn shona so somali sq
albanian sr serbian su sundanese sv swedish sw swahili ta tamil te telugu tg tajik th thai tk
turkmen tl tagalog tr turkish tt tatar uk ukrainian ur urdu uz uzbek vi vietnamese yi yiddish yo
yoruba yue cantonese zh chinese
"""
_WORDS = _CODES_AND_NAMES.split()
_NAMES = dict(zip(_WORDS[::2], _WORDS[1::2]))


def language_name(code: str) -> str:
    """Return the name of a language, "english" for "" as for "en", and the code itself if it has no name."""
    return _NAMES.get(code or "en", code).replace("_", " ")
