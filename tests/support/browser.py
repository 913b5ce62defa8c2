"""A page in a real browser, as a reader sees it."""


class Page:
    """A report that is open, as a reader sees it."""

    def __init__(self, browser, address):
        self.browser = browser
        browser.get(address)
        self.wait(lambda: self.script("return !!document.getElementById('group')?.dataset.shown"))

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def wait(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, 90, poll_frequency=0.05).until(lambda _: condition())

    def choose(self, **chosen):
        from selenium.webdriver.support.ui import Select

        for name, value in chosen.items():
            Select(self.browser.find_element("id", name)).select_by_value(value)

    def offered(self, name):
        options = f"return [...document.getElementById('{name}').options].map((o) => o.value)"
        return self.script(options)

    def colour_by(self, mode):
        self.browser.find_element("css selector", f"input[value={mode}]").click()

    def shows(self, stage, step, domain, task):
        wanted = f"{stage} {step} {domain} {task}"
        self.wait(
            lambda: self.script("return document.getElementById('group')?.dataset.shown") == wanted
        )
        return True

    def texts(self, selector):
        texts = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.script(texts, selector)

    def complaints(self):
        return self.browser.get_log("browser")
