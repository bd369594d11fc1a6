"""Texts that tokenizers get wrong: prose, code, emoji, mixed scripts, special tokens, runs of white space, digits."""

from __future__ import annotations

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "Hello, world! How's it going? I'm fine; they'll see we've won.",
    "DON'T SHOUT, IT'S RUDE",
    " leading space",
    "trailing spaces  ",
    "  two   three    four",
    "\n\n\n\n\t\t tabs\r\n and  lines \n \n",
    "def area(radius):\n    return 3.14159 * radius**2  # r^2\n\n\tif x != y:\n\t\tpass\n",
    "for(int i=0;i<10;++i){a[i]=b->c::d(0x1F);}",
    "1 22 333 4444 55555  666666   7777777",
    "a  1\n\n 2\t3 v2.0.1 2024-01-31 1,000,000 ½ ² ⅷ ٣",
    "Café déjà vu, naïve façade: Ångström",
    "e\u0301 and \u00e9 are one letter",
    "日本語のテキスト、中文文本\uff0c한국어 텍스트",
    "Привет, мир! שלום مرحبا हिन्दी தமிழ் ไทย",
    "😀👍🏽 👩\u200d👩\u200d👧\u200d👦🇩🇪 text between 🚀🚀",
    "\u200b\u00a0\u3000odd\u2028spaces\x00\x7f",
    "\U0001d518\U0001d52b\U0001d526 𐍈 ﷺ ﬁ",
    "http://example.org/a?b=c&d=%20#frag user@example.org",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "almost <|im_start and <|endoftext|>right<|endoftext|>",
    "x" * 200,
    " " * 70 + "deep",
    "the the the thethe then there",
]
