"""What a message of a conversation leaves to look up: small talk nothing, "and why?" only the question before it.

Knows words; knows no collection and no hits.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvarn.retrieval.text_analysis import DEFAULT_LANGUAGE, is_stop_word, words

_GREETING_WORDS = (
    "hello hi hey there dear good morning afternoon evening night day welcome bye goodbye thanks thank thx ty cheers "
    "much very great nice cool perfect wonderful awesome excellent helpful help lot ok okay okey yes yeah yep no nope "
    "please sorry sure right fine got "
    "hallo guten tag morgen abend danke dank vielen schön bitte tschüss ja nein gut "
    "hej hejsan god dag tack så mycket snälla nej bra takk tak kiitos hei moi "
    "bonjour bonsoir salut merci beaucoup oui non bien hola buenos días buenas tardes gracias muchas sí vale "
    "ciao buongiorno grazie mille olá obrigado obrigada bom dia dank je wel goedemorgen köszönöm szia "
    "привет здравствуйте спасибо да нет хорошо 你好 谢谢 好的 こんにちは ありがとう"
)
_ASKING_WORDS = (
    "why what how who where when which whose about more else tell explain continue elaborate go on me you your i "
    "my can could would should will do does did so then also too again say said mean meant example examples detail "
    "details briefly short shorter longer sentence sentences "
    "warum wieso weshalb was wie wer wo wann welche mehr genauer und erkläre erklär weiter beispiel "
    "varför vad hur vem var när vilken mer och sedan då förklara exempel hvorfor hva hvad hvordan "
    "pourquoi quoi comment qui où quand plus et exemple explique por qué cómo quién dónde cuándo más y ejemplo explica "
    "perché cosa come chi dove quando di più e porquê quem onde mais waarom wat hoe wie waar wanneer meer en "
    "почему что как кто где когда ещё 为什么 なぜ"
)
_GREETINGS = frozenset(_GREETING_WORDS.split())
_ADDRESSED = frozenset({"you", "your", "s", "re", "m", "ll", "ve", "d", "t"})  # and what is left of "that's", "you're"
_TALK = _GREETINGS | _ADDRESSED | frozenset(_ASKING_WORDS.split())


def own_words(message: str, language: str = DEFAULT_LANGUAGE) -> list[str]:
    """The words of a message that could be looked up: no stop words, no greetings, and none that only ask."""
    return [word for word in words(message) if word not in _TALK and not is_stop_word(word, language)]


def is_greeting(message: str, language: str = DEFAULT_LANGUAGE) -> bool:
    """Whether a message greets, thanks or agrees and does nothing else; one without any word does, too."""
    found = words(message)
    others = [word for word in found if word not in _GREETINGS]
    is_only = all(word in _ADDRESSED or is_stop_word(word, language) for word in others)
    return is_only and (not found or len(others) < len(found))


def question_before(asked: Sequence[str], language: str = DEFAULT_LANGUAGE) -> str | None:
    """The last of the user's messages before the last one that has words of its own."""
    return next((text for text in reversed(asked[:-1]) if own_words(text, language)), None)
