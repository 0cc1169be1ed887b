"""The chat page in Chromium, against a server with canned answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are missing")
pytest.importorskip("starlette", reason="the server's packages are missing")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing")

from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

from tests.serve.http.fake_server import HOSTILE, MARKDOWN, FakeServer  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--window-size=900,800",
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="no Chromium with chromedriver on this machine"
    ),
]


class Chat:
    """The page in the browser."""

    def __init__(self, browser: Any, server: FakeServer) -> None:
        self.browser = browser
        self.server = server

    def open(self, url: str = "") -> None:
        self.browser.get(url or self.server.url)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """Read in one step: between two the page may put other elements in their place."""
        return self.run("return all(arguments[0]).map((e) => e.textContent)", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def wait(self, condition: Any) -> Any:
        return WebDriverWait(self.browser, 20, 0.02).until(lambda _: condition())

    def type(self, text: str) -> None:
        self.find("#entry").send_keys(text, Keys.ENTER)

    def wait_until_done(self) -> None:
        self.wait(lambda: self.run("return !chat.running && !chat.starting"))

    def say(self, text: str) -> None:
        self.type(text)
        self.wait_until_done()

    def press(self, text: str) -> None:
        self.browser.find_element(By.XPATH, f"//button[text()='{text}']").click()

    def set(self, name: str, value: str) -> None:
        script = "form.elements[arguments[0]].value = arguments[1]; saveSettings()"
        self.run(script, name, value)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def chat(browser: Any, server: FakeServer) -> Iterator[Chat]:
    """A new page with nothing kept. After the test: no breach of the policy, no error of a script."""
    page = Chat(browser, server)
    page.open()
    page.wait(lambda: page.run("return typeof saveMessages == 'function'"))  # scripts have run
    page.run(
        "localStorage.clear(); sessionStorage.clear(); removeEventListener('pagehide', saveMessages)"
    )
    page.open()
    page.wait(lambda: page.find("#model").is_enabled())
    server.bodies.clear()
    browser.get_log("browser")
    yield page
    problems = [
        entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"
    ]
    assert [text for text in problems if "the server responded" not in text] == []


def test_an_answer_streams_with_its_numbers(chat: Chat) -> None:
    chat.say("hello")
    assert chat.texts(".body") == ["You said hello."]
    (stats,) = chat.texts(".answer .stats")
    assert stats.startswith("6 tokens · ") and "first token" in stats
    assert stats.endswith("prompt 31 tokens (16 cached)")
    (body,) = chat.server.bodies
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 5,
    }


def test_settings_become_fields_of_the_request(chat: Chat) -> None:
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "min_p": "0.05"}
    for name, value in {**values, "max_tokens": "64", "seed": "7", "system": "Be brief."}.items():
        chat.set(name, value)
    chat.set("stop", "END\n\\n\\n")
    chat.run("form.elements.logprobs.checked = false")
    chat.say("hi")
    body = chat.server.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    wanted: dict[str, Any] = {name: float(value) for name, value in values.items()}
    wanted |= {"max_completion_tokens": 64, "seed": 7, "stop": ["END", "\n\n"]}
    assert {name: body.get(name) for name in wanted} == wanted
    assert "logprobs" not in body and not chat.all(".token")


@pytest.mark.parametrize(
    ("kind", "source", "fields"),
    [
        ("none", "ignored", {}),
        ("json_object", "ignored", {"response_format": {"type": "json_object"}}),
        (
            "json_schema",
            '{"type": "object"}',
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ("regex", "[a-z]+", {"structured_outputs": {"regex": "[a-z]+"}}),
        ("choice", "yes\n\nno", {"structured_outputs": {"choice": ["yes", "no"]}}),
        ("grammar", 'start: "a"', {"structured_outputs": {"grammar": 'start: "a"'}}),
    ],
)
def test_structured_output(chat: Chat, kind: str, source: str, fields: dict[str, Any]) -> None:
    chat.set("format", kind)
    chat.set("format_source", source)
    assert chat.run("return readFormat()") == fields


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tools", "[{", "Tools: not JSON"),
        ("tools", "{}", "Tools: must be a list"),
        ("format_source", "{", "JSON schema: not JSON"),
        ("format_source", "[]", "JSON schema: must be an object"),
        ("format_source", " ", "JSON schema: nothing entered"),
        ("temperature", "9", "temperature: "),
        ("top_k", "1.5", "top_k: "),
    ],
)
def test_wrong_settings_are_not_sent(chat: Chat, name: str, value: str, message: str) -> None:
    if name == "format_source":
        chat.set("format", "json_schema")
        chat.run("showFormatField()")
    chat.set(name, value)
    chat.say("hello")
    assert message in chat.find("#notice").text
    assert chat.server.bodies == []
    assert chat.find("#entry").get_property("value") == "hello"
    assert chat.run("return document.activeElement.name") == name
    assert chat.run("return chat.messages") == []


def test_text_of_the_model_stays_text(chat: Chat) -> None:
    chat.say("hostile")
    assert chat.texts(".body") == [HOSTILE]
    assert chat.browser.title == "fulgurite chat"
    assert not chat.all(".body img, .body script")


def test_markdown(chat: Chat) -> None:
    chat.say("markdown")
    assert chat.texts(".body h4") == ["Why the sky is blue"]
    assert chat.texts(".body strong") == ["molecules of air", "straight"]
    assert chat.texts(".body :not(pre) > code") == ["450 nm", "700 nm"]
    assert chat.texts(".body pre code") == [MARKDOWN.split("```")[1].removeprefix("python\n")]
    assert len(chat.all(".body > ol > li")) == 2 and len(chat.all(".body ol ul > li")) == 2
    assert chat.texts(".body p")[-1] == "So <b>blue</b> & 😀 wins."


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a ** b ** c", "<p>a ** b ** c</p>"),
        ("**open", "<p>**open</p>"),
        ("`a*b*` *c*", "<p><code>a*b*</code> <em>c</em></p>"),
        ("``a`b``", "<p><code>a`b</code></p>"),
        ("\\*a\\*", "<p>*a*</p>"),
        ("snake_case__name__x", "<p>snake_case__name__x</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n\n- b\ntext", "<ul><li>a</li><li>b\ntext</li></ul>"),
        ("- a\n    - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("---", "<hr>"),
        ("```\nopen", '<pre tabindex="0"><code>open</code></pre>'),
        ("````\n```\n````", '<pre tabindex="0"><code>```\n</code></pre>'),
        ("&lt;<i>", "<p>&amp;lt;&lt;i&gt;</p>"),
        ("\n\n", ""),
        ("-", "<ul><li></li></ul>"),
    ],
)
def test_markdown_of(chat: Chat, text: str, html: str) -> None:
    script = """
      const leaf = (from, to) => (from < to ? [arguments[0].slice(from, to)] : []);
      return renderBlocks(arguments[0], leaf).map(({ element }) => element.outerHTML).join("");
    """
    assert chat.run(script, text) == html


@pytest.mark.parametrize("content", [MARKDOWN, "1. a\n\n2. b\n\n10. c", "a\n---\n``\n```\nb"])
def test_markdown_drawn_piece_by_piece_is_the_same(chat: Chat, content: str) -> None:
    """An answer that grows by one character at a time ends as one that came whole."""
    script = """
      const [content] = arguments;
      const grown = new AnswerView({ ...makeAnswer(), tokens: [] }, {});
      for (let end = 1; end <= content.length; end += 1) {
        grown.message.content = content.slice(0, end);
        grown.draw();
      }
      const whole = new AnswerView({ ...makeAnswer(), content }, {});
      whole.draw();
      return [grown.body.outerHTML, whole.body.outerHTML];
    """
    grown, whole = chat.run(script, content)
    assert grown == whole


def test_markers_by_the_thousand_take_linear_time(chat: Chat) -> None:
    """Quadratic work over these would run into the driver's time limit."""
    script = """
      const text = arguments[0].repeat(60000);
      return renderBlocks(text, (from, to) => [text.slice(from, to)]).length;
    """
    chat.browser.set_script_timeout(20)
    for marker in ("*a ", "**a ", "`a ", "__a ", "* ", "\\*"):
        assert chat.run(script, marker) == 1


def test_a_token_shows_its_alternatives(chat: Chat) -> None:
    chat.say("one two three four")
    tokens = chat.all(".token")
    assert [token.get_property("textContent") for token in tokens][:3] == ["You", " said", " one"]
    assert "shade-0" in tokens[0].get_attribute("class")
    assert "shade-5" in tokens[3].get_attribute("class")
    ActionChains(chat.browser).move_to_element(tokens[3]).perform()
    rows = [row.text.split() for row in chat.all("#alternatives .row")]
    assert [row[-1] for row in rows] == ["46.5%", "18.6%", "9.3%", "7.0%", "4.7%"]
    assert chat.find("#alternatives .chosen").text.split() == ["␣two", "7.0%"]
    ActionChains(chat.browser).move_to_element(chat.find("#entry")).perform()
    assert not chat.find("#alternatives").is_displayed()


def test_tokens_by_keyboard(chat: Chat) -> None:
    chat.say("one two")
    assert len(chat.all(".token[tabindex='0']")) == 1
    chat.run("one('.token').focus()")
    ActionChains(chat.browser).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert chat.run("return document.activeElement.textContent") == " one"
    assert chat.find("#alternatives .chosen").text.startswith("␣one")
    assert (
        chat.run("return document.activeElement.getAttribute('aria-describedby')") == "alternatives"
    )


def test_tokens_with_a_part_of_a_character(chat: Chat) -> None:
    chat.say("emoji")
    assert chat.texts(".body") == ["😀 ok"]
    assert chat.texts(".token") == ["😀", " ok"]
    assert chat.run("return chat.messages[1].tokens.map(({ text }) => text)") == ["\ufffd", " ok"]


def test_results_of_tool_calls_continue_the_conversation(chat: Chat) -> None:
    tools = '[{"type": "function", "function": {"name": "weather"}}]'
    chat.set("tools", tools)
    chat.say("tools")
    assert chat.texts(".call h3 code") == ["weather", "weather"]
    chat.say("something else")
    assert "result of the tool call first" in chat.find("#notice").text
    for field, result in zip(chat.all(".call textarea"), ["4 °C", "18 °C"]):
        field.send_keys(result)
    chat.press("Send results")
    chat.wait(lambda: len(chat.server.bodies) == 2)
    chat.wait_until_done()
    first, second = chat.server.bodies
    assert (
        first["tools"] == second["tools"] == [{"type": "function", "function": {"name": "weather"}}]
    )
    _, asked, *results = second["messages"]
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [
        '{"city": "Oslo"}',
        '{"city": "Rome"}',
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call-0", "content": "4 °C"},
        {"role": "tool", "tool_call_id": "call-1", "content": "18 °C"},
    ]
    assert chat.texts(".body")[-1] == "It is 18 °C."


def test_reasoning_is_folded(chat: Chat) -> None:
    chat.say("reason")
    assert chat.texts(".reasoning > div") == ["The user greets. I greet back."]
    assert chat.find(".reasoning").get_attribute("open") is None
    assert chat.texts(".body") == ["Hello there."]
    chat.say("more")
    assert chat.server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Hello there."}


@pytest.mark.parametrize(
    ("scenario", "message", "text"),
    [
        ("full", "429 Too Many Requests: the queue is full. Try again in 3 s.", ""),
        ("html", "502 Bad Gateway: <h1>Bad gateway</h1>.", ""),
        ("break", "the engine was restarted", "Half an"),
        ("cut", "The stream ended before the answer was complete.", "No end of it."),
    ],
)
def test_errors_are_shown(chat: Chat, scenario: str, message: str, text: str) -> None:
    if scenario == "cut":
        chat.server.send_end = False
    chat.say(scenario)
    chat.server.send_end = True
    assert chat.find(".error").text == message
    assert chat.texts(".body") == [text]
    assert chat.find("#send").is_displayed()
    chat.press("Try again")
    chat.wait(lambda: len(chat.server.bodies) == 2)
    chat.wait_until_done()
    assert chat.server.bodies[0] == chat.server.bodies[1]


def test_a_cut_answer_says_so(chat: Chat) -> None:
    chat.say("long")
    assert chat.texts(".stats")[0].endswith("cut at the token limit")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stopping_closes_the_connection(chat: Chat, way: str) -> None:
    before = chat.server.disconnects
    chat.type("slow")
    chat.wait(lambda: len(chat.all(".token")) > 3)
    script = "return [one('.stats').textContent, all('.token').length]"
    (stats, drawn) = chat.run(script)
    assert "waiting" not in stats and drawn > 3
    chat.wait(lambda: "tokens/s" in chat.texts(".stats")[0])
    assert chat.find("#log").get_attribute("aria-busy") == "true"
    if way == "button":
        chat.find("#stop").click()
    else:
        chat.find("#entry").send_keys(Keys.ESCAPE)
    chat.wait_until_done()
    chat.wait(lambda: chat.server.disconnects == before + 1)
    assert chat.texts(".stats")[0].startswith("about ") and "stopped" in chat.texts(".stats")[0]
    assert chat.find("#log").get_attribute("aria-busy") == "false"


def test_a_new_chat_leaves_a_running_answer(chat: Chat) -> None:
    chat.type("slow")
    chat.wait(lambda: len(chat.all(".token")) > 3)
    chat.find("#new-chat").click()
    chat.say("hello")
    assert chat.texts(".body") == ["You said hello."]
    assert len(chat.server.bodies[1]["messages"]) == 1


def test_an_answer_that_was_left_does_not_end_the_next_one(chat: Chat) -> None:
    """The old answer ends after the new one has begun: both calls are in one task of the script."""
    chat.type("slow")
    chat.wait(lambda: len(chat.all(".token")) > 3)
    chat.run("startNewChat(); entry.value = 'slow again'; send()")
    chat.wait(lambda: len(chat.all(".token")) > 3)
    assert chat.run("return chat.running?.message === chat.messages[1]") is True
    assert chat.find("#stop").is_displayed()
    chat.find("#stop").click()
    chat.wait_until_done()


def test_numbers_are_drawn_with_the_text(chat: Chat) -> None:
    """Without the timer, which also draws them."""
    chat.run("window.setInterval = () => 0")
    chat.type("slow")
    chat.wait(lambda: len(chat.all(".token")) > 3)
    assert "token" in chat.texts(".stats")[0]
    chat.find("#stop").click()
    chat.wait_until_done()


def test_edit_and_regenerate(chat: Chat) -> None:
    chat.say("first")
    chat.say("second")
    chat.press("Regenerate")
    chat.wait(lambda: len(chat.server.bodies) == 3)
    chat.wait_until_done()
    assert chat.server.bodies[2] == chat.server.bodies[1]
    chat.press("Edit")
    field = chat.find(".editing textarea")
    field.send_keys(Keys.ESCAPE)
    assert chat.texts(".said") == ["first", "second"]
    chat.press("Edit")
    chat.find(".editing textarea").send_keys(" thought", Keys.ENTER)
    chat.wait(lambda: len(chat.server.bodies) == 4)
    chat.wait_until_done()
    contents = [message["content"] for message in chat.server.bodies[3]["messages"]]
    assert contents == ["first", "You said first.", "second thought"]
    assert chat.texts(".body") == ["You said first.", "You said second thought."]


def test_shift_enter_is_a_new_line(chat: Chat) -> None:
    chat.find("#entry").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b", Keys.ENTER)
    chat.wait_until_done()
    assert chat.server.bodies[0]["messages"][0]["content"] == "a\nb"


def test_the_conversation_is_kept(chat: Chat) -> None:
    chat.set("system", "Be brief.")
    chat.find("#theme").click()
    chat.say("tools")
    chat.find("#new-chat").click()
    chat.say("hello")
    chat.open()
    assert chat.texts(".body") == ["You said hello."]
    assert len(chat.all(".token")) == 4
    assert chat.run(
        "return [form.elements.system.value, document.documentElement.dataset.theme]"
    ) == [
        "Be brief.",
        "light",
    ]
    chat.find("#new-chat").click()
    chat.open()
    assert not chat.all(".message") and chat.find("#welcome").is_displayed()


@pytest.mark.parametrize(
    "kept", ["null", "{", "[1, null]", '[{"role": "assistant", "content": "x"}]']
)
def test_a_damaged_conversation_does_not_break_the_page(chat: Chat, kept: str) -> None:
    script = "localStorage.setItem('fulgurite-chat', arguments[0]);"
    chat.run(f"removeEventListener('pagehide', saveMessages); {script}", kept)
    chat.open()
    chat.wait(lambda: chat.find("#model").is_enabled())
    chat.say("hello")
    assert chat.texts(".body")[-1] == "You said hello."


def test_api_key(chat: Chat) -> None:
    with FakeServer(api_key="secret") as guarded:
        chat.open(guarded.url)
        chat.wait(lambda: "Enter the API key in Settings" in chat.find("#notice").text)
        chat.find("#settings-toggle").click()
        chat.find("[name=api_key]").send_keys("secret", Keys.TAB)
        chat.wait(lambda: chat.find("#model").is_enabled())
        chat.say("hello")
        assert chat.texts(".body") == ["You said hello."]
        assert chat.run("return JSON.stringify(localStorage).includes('secret')") is False
        chat.open(guarded.url)
        chat.wait(lambda: chat.find("#model").is_enabled())


def test_nothing_leaves_the_server_and_nothing_overflows(chat: Chat) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    chat.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        chat.say("markdown")
        chat.find("#settings-toggle").click()
        assert chat.run("return [document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    finally:
        chat.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    names = chat.run("return performance.getEntriesByType('resource').map(({ name }) => name)")
    assert names and all(name.startswith(chat.server.url) for name in names)
