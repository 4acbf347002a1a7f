"""A converter of OASST's message trees, with one message or one tree per row, into conversations.

    data: {sources: [{path: oasst.jsonl, format: "examples/formats/oasst.py:rows"}]}

Each path from a root to a last reply is a conversation, so no reply is lost; the best-ranked child goes first (null
ranks last, then file order). A message that several paths share carries loss only in the first of them (`train: false`
in the others), so none is learned twice. Deleted messages, messages whose parent is not in the data, everything below
either, and questions without a reply are left out.

It is a generator: a conversation needs messages of several rows, so it gets all rows of the source.
"""

from collections import defaultdict

ROLES = {"prompter": "user", "user": "user", "human": "user", "assistant": "assistant", "system": "system"}
READ = {"message_id", "parent_id", "role", "text", "rank", "deleted", "replies"}


def rows(source):
    nodes = {}
    for row in source:
        for message in messages_of(row):
            if problem := problem_of(message, nodes):
                yield row, ValueError(problem)
            else:
                nodes[message["message_id"]] = (message, row)
    yield from threaded(nodes)


def messages_of(row):
    """Yield the messages of a row: of a tree each, with its parent's id, in file order; otherwise the row itself."""
    if not isinstance(row.get("prompt"), dict):
        yield row
        return
    waiting = [(row["prompt"], None)]
    while waiting:
        message, parent = waiting.pop()
        message = message if isinstance(message, dict) else {}
        yield {**message, "parent_id": parent}
        replies = message.get("replies") if isinstance(message.get("replies"), list) else []
        waiting += [(reply, message.get("message_id")) for reply in reversed(replies)]


def problem_of(message, nodes):
    """Return what is wrong with a message; empty if it can be read."""
    for name in ("message_id", "role", "text"):
        if not isinstance(message.get(name), str):
            return f"{name} is {message.get(name)!r:.40}, not a string"
    if message["message_id"] in nodes:
        first = nodes[message["message_id"]][1].origin
        return f"message_id {message['message_id']!r} is given twice; first at {first}"
    if message["role"].lower() not in ROLES:
        return f"role {message['role']!r} is unknown; known: {', '.join(ROLES)}"
    try:
        rank_of(message)
    except (TypeError, ValueError):
        return f"rank is {message['rank']!r:.40}, not a number"
    return ""


def rank_of(message):
    rank = message.get("rank")
    return float("inf") if rank in (None, "") else float(rank)


def is_deleted(message):
    return message.get("deleted") in (True, "true", "True")


def role_of(message):
    return ROLES[message["role"].lower()]


def threaded(nodes):
    """Yield a conversation for each path that ends in a reply, and why each other message is left out."""
    ordered = in_depth(nodes)
    answered = set()  # ids of messages with a reply somewhere below
    for message in reversed(ordered):
        if role_of(message) == "assistant" or message["message_id"] in answered:
            answered.add(message.get("parent_id") or None)
    taught = set()
    for leaf in ordered:
        if role_of(leaf) == "assistant" and leaf["message_id"] not in answered:
            path = [leaf]
            while path[-1].get("parent_id"):
                path.append(nodes[path[-1]["parent_id"]][0])
            turns = [as_turn(message, taught) for message in reversed(path)]
            # with the other columns, so that flatout sees what is there besides: pictures, a verdict
            others = [item for message in path for item in message.items() if item[0] not in READ]
            rest = {name: value for name, value in others if value is not None}
            yield nodes[leaf["message_id"]][1], {**rest, "messages": turns}
            taught.update(message["message_id"] for message in path)
    yield from left_out(nodes, {message["message_id"] for message in ordered}, taught)


def in_depth(nodes):
    """Return the messages that a root leads to, depth first, the best-ranked child first."""
    children = defaultdict(list)
    for message, _ in sorted(nodes.values(), key=lambda node: rank_of(node[0])):  # a stable sort keeps file order
        if not is_deleted(message):
            children[message.get("parent_id") or None].append(message)
    ordered, waiting = [], children[None][::-1]  # a loop, since a tree may be deeper than the stack
    while waiting:
        ordered.append(waiting.pop())
        waiting += reversed(children[ordered[-1]["message_id"]])
    return ordered


def left_out(nodes, reached, taught):
    for name, (message, row) in nodes.items():
        if is_deleted(message):
            yield row, "deleted"
        elif name not in reached:
            yield row, "whose parent is deleted or not in the data"
        elif name not in taught:
            yield row, "questions without a reply"


def as_turn(message, taught):
    turn = {"role": role_of(message), "content": message["text"]}
    return turn | {"train": False} if message["message_id"] in taught else turn
