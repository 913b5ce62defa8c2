"use strict";

// Control characters, such as those that turn the direction of the text around them, are shown by
// their numbers. Emoji and some scripts need U+200C and U+200D.
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}]/gu, (c) =>
    "\n\t\u200c\u200d".includes(c) ? c : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}

// Texts of models and environments enter the page as text alone, never as markup.
function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = visible(text);
  return made;
}

// Parts of a line, each in its own direction, so that none moves the others.
function lineOf(tag, className, separator, ...parts) {
  const made = element(tag, className);
  parts.forEach((part, i) => made.append(i ? separator : "", element("bdi", "", part)));
  return made;
}

const byId = (id) => document.getElementById(id);

byId("theme").addEventListener("click", () => {
  const scheme = document.documentElement.style.colorScheme;
  const isDark = scheme ? scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.style.colorScheme = isDark ? "light" : "dark";
});
