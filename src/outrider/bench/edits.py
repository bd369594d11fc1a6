"""Prompts that ask for a small change in code: most of the answer repeats the question."""

from __future__ import annotations

# (the parameter, its new name, the function)
FUNCTIONS = (
    (
        "values",
        "numbers",
        """def running_mean(values, size):
    if size < 1:
        raise ValueError("size must be at least 1")
    means = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= size:
            total -= values[index - size]
        means.append(total / min(index + 1, size))
    return means""",
    ),
    (
        "text",
        "message",
        """def count_words(text, shortest=1):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if len(word) >= shortest:
            counts[word] = counts.get(word, 0) + 1
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ordered[: len(text)]""",
    ),
    (
        "items",
        "elements",
        """def merge_sort(items):
    if len(items) <= 1:
        return items
    middle = len(items) // 2
    left = merge_sort(items[:middle])
    right = merge_sort(items[middle:])
    merged = []
    while left and right:
        if left[0] <= right[0]:
            merged.append(left.pop(0))
        else:
            merged.append(right.pop(0))
    return merged + left + right""",
    ),
    (
        "number",
        "candidate",
        """def is_prime(number):
    if number < 2:
        return False
    if number % 2 == 0:
        return number == 2
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
    return True""",
    ),
    (
        "path",
        "filename",
        """def read_settings(path):
    settings = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, _, value = line.partition("=")
            settings[key.strip()] = value.strip()
    return settings""",
    ),
    (
        "rows",
        "records",
        """def print_table(rows, columns):
    widths = [len(column) for column in columns]
    for row in rows:
        for index, column in enumerate(columns):
            widths[index] = max(widths[index], len(str(row[column])))
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths)))
    for row in rows:
        print("  ".join(str(row[column]).ljust(width) for column, width in zip(columns, widths)))""",
    ),
    (
        "graph",
        "network",
        """def shortest_path(graph, start, goal):
    queue = [[start]]
    visited = {start}
    while queue:
        path = queue.pop(0)
        node = path[-1]
        if node == goal:
            return path
        for neighbour in graph.get(node, []):
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append(path + [neighbour])
    return None""",
    ),
    (
        "amount",
        "total",
        """def make_change(amount, coins):
    if amount < 0:
        raise ValueError("amount must not be negative")
    change = {}
    for coin in sorted(coins, reverse=True):
        count = amount // coin
        if count > 0:
            change[coin] = count
            amount -= count * coin
    if amount > 0:
        raise ValueError("amount cannot be paid with these coins")
    return change""",
    ),
)


def prompts() -> list[str]:
    return [
        f"Rename the parameter `{old}` to `{new}` in this function and return the whole function:\n"
        f"```python\n{function}\n```"
        for old, new, function in FUNCTIONS
    ]
