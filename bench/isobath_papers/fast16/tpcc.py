"""TPC-C on SQLite: all five transactions in the specification's mix, one terminal, no think time, each commit durable.

    tpcc.py prepare DATABASE
    tpcc.py run DATABASE SECONDS SEED

Scaled down to what a short run touches: 4 warehouses of 10 districts, each with 300 customers and 300 orders (the
specification: 3,000), 20,000 items (100,000). Write-ahead log and `synchronous=full`: one sync a commit, as a database
server's log has it. `run` prints JSON.
"""

import json
import os
import random
import sqlite3
import statistics
import sys
import time

WAREHOUSES, DISTRICTS, CUSTOMERS, ORDERS, ITEMS = 4, 10, 300, 300, 20_000
# Orders not delivered yet begin here.
FIRST_NEW = ORDERS * 7 // 10 + 1
SYLLABLES = "BAR OUGHT ABLE PRI PRES ESE ANTI CALLY ATION EING".split()
# What the runs' draws of last names and of customers and items are shifted by (NURand's C).
SHIFT = 123
# What texts are cut from.
TEXT = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=1 << 16))
MIX = {"new_order": 45, "payment": 43, "order_status": 4, "delivery": 4, "stock_level": 4}

TABLES = """
create table warehouse (w integer primary key, name text, street text, city text, zip text, tax real, ytd real);
create table district (w integer, d integer, name text, street text, city text, zip text, tax real, ytd real,
    next_order integer, primary key (w, d)) without rowid;
create table customer (w integer, d integer, c integer, first text, middle text, last text, street text, city text,
    zip text, phone text, since text, credit text, credit_limit real, discount real, balance real, ytd_payment real,
    payments integer, deliveries integer, data text, primary key (w, d, c)) without rowid;
create index customer_name on customer (w, d, last, first);
create table history (w integer, d integer, c integer, to_w integer, to_d integer, at text, amount real, data text);
create table new_orders (w integer, d integer, o integer, primary key (w, d, o)) without rowid;
create table orders (w integer, d integer, o integer, c integer, at text, carrier integer, lines integer,
    all_local integer, primary key (w, d, o)) without rowid;
create index orders_customer on orders (w, d, c, o);
create table order_line (w integer, d integer, o integer, number integer, i integer, supply_w integer, delivered text,
    quantity integer, amount real, info text, primary key (w, d, o, number)) without rowid;
create table item (i integer primary key, image integer, name text, price real, data text);
create table stock (w integer, i integer, quantity integer, district text, ytd integer, orders integer,
    remote integer, data text, primary key (w, i)) without rowid;
"""


def connect(path):
    """A connection whose every commit is durable."""
    base = sqlite3.connect(path, isolation_level=None)
    base.execute("pragma journal_mode=wal")
    base.execute("pragma synchronous=full")
    return base


def letters(choice, least, most):
    length = choice.randint(least, most)
    start = choice.randrange(len(TEXT) - most)
    return TEXT[start : start + length]


def last_name(number):
    return SYLLABLES[number // 100] + SYLLABLES[number // 10 % 10] + SYLLABLES[number % 10]


def skewed(choice, bits, low, high):
    """The specification's NURand."""
    return ((choice.randint(0, bits) | choice.randint(low, high)) + SHIFT) % (high - low + 1) + low


def any_name(choice):
    return last_name(skewed(choice, 255, 0, 999) % CUSTOMERS)


def any_customer(choice):
    return skewed(choice, 1023, 1, CUSTOMERS)


def any_item(choice):
    return skewed(choice, 8191, 1, ITEMS)


def address(choice):
    return letters(choice, 10, 20), letters(choice, 10, 20), f"{choice.randint(0, 9999):04}11111"


def rows(columns):
    return f"values ({', '.join('?' * columns)})"


def prepare(path):
    """A database as it is before the first transaction."""
    choice = random.Random(1)
    base = connect(path)
    base.executescript(TABLES)
    base.execute("begin")
    items = (
        (i, choice.randint(1, 10_000), letters(choice, 14, 24), choice.uniform(1, 100), letters(choice, 26, 50))
        for i in range(1, ITEMS + 1)
    )
    base.executemany(f"insert into item {rows(5)}", items)
    for w in range(1, WAREHOUSES + 1):
        base.execute(
            f"insert into warehouse {rows(7)}",
            (w, letters(choice, 6, 10), *address(choice), choice.uniform(0, 0.2), 300_000),
        )
        stock = (
            (w, i, choice.randint(10, 100), letters(choice, 240, 240), 0, 0, 0, letters(choice, 26, 50))
            for i in range(1, ITEMS + 1)
        )
        base.executemany(f"insert into stock {rows(8)}", stock)
        for d in range(1, DISTRICTS + 1):
            prepare_district(base, choice, w, d)
    base.execute("commit")
    base.execute("pragma wal_checkpoint(truncate)")
    base.close()


def prepare_district(base, choice, w, d):
    row = (w, d, letters(choice, 6, 10), *address(choice), choice.uniform(0, 0.2), 30_000, ORDERS + 1)
    base.execute(f"insert into district {rows(9)}", row)
    for c in range(1, CUSTOMERS + 1):
        credit = "BC" if choice.random() < 0.1 else "GC"
        row = (
            w,
            d,
            c,
            letters(choice, 8, 16),
            "OE",
            last_name(c - 1),
            *address(choice),
            f"{choice.randrange(10**16):016}",
            "2026-01-01",
            credit,
            50_000,
            choice.uniform(0, 0.5),
            -10,
            10,
            1,
            0,
            letters(choice, 300, 500),
        )
        base.execute(f"insert into customer {rows(19)}", row)
        base.execute(f"insert into history {rows(8)}", (w, d, c, w, d, "2026-01-01", 10, letters(choice, 12, 24)))
    customers = list(range(1, CUSTOMERS + 1))
    choice.shuffle(customers)
    for o, c in enumerate(customers[:ORDERS], 1):
        done, count = o < FIRST_NEW, choice.randint(5, 15)
        base.execute(
            f"insert into orders {rows(8)}",
            (w, d, o, c, "2026-01-01", choice.randint(1, 10) if done else None, count, 1),
        )
        if not done:
            base.execute(f"insert into new_orders {rows(3)}", (w, d, o))
        for number in range(1, count + 1):
            amount = 0 if done else choice.uniform(0.01, 9999.99)
            line = (
                w,
                d,
                o,
                number,
                choice.randint(1, ITEMS),
                w,
                "2026-01-01" if done else None,
                5,
                amount,
                letters(choice, 24, 24),
            )
            base.execute(f"insert into order_line {rows(10)}", line)


class Terminal:
    """Draws transactions and carries them out."""

    def __init__(self, base, seed):
        self.base = base
        self.choice = random.Random(seed)

    def one(self, query, *values):
        return self.base.execute(query, values).fetchone()

    def place(self):
        return self.choice.randint(1, WAREHOUSES), self.choice.randint(1, DISTRICTS)

    def other_warehouse(self, w):
        return self.choice.choice([each for each in range(1, WAREHOUSES + 1) if each != w])

    def customer(self, w, d):
        """A customer's number: in 60 % of cases the middle one of a last name."""
        if self.choice.random() >= 0.6:
            return any_customer(self.choice)
        found = self.base.execute(
            "select c from customer where w = ? and d = ? and last = ? order by first", (w, d, any_name(self.choice))
        ).fetchall()
        return found[(len(found) - 1) // 2][0]

    def run(self, name):
        self.base.execute("begin immediate" if name not in ("order_status", "stock_level") else "begin")
        done = getattr(self, name)()
        self.base.execute("rollback" if done is False else "commit")

    def new_order(self):
        """False where an item does not exist, which one in a hundred asks for: nothing of it stays."""
        choice, execute = self.choice, self.base.execute
        w, d = self.place()
        c, count = any_customer(choice), choice.randint(5, 15)
        wrong = choice.random() < 0.01
        lines = [
            (any_item(choice), self.other_warehouse(w) if choice.random() < 0.01 else w, choice.randint(1, 10))
            for _ in range(count)
        ]
        tax = self.one("select tax from warehouse where w = ?", w)[0]
        district_tax, o = self.one("select tax, next_order from district where w = ? and d = ?", w, d)
        execute("update district set next_order = next_order + 1 where w = ? and d = ?", (w, d))
        discount = self.one("select discount, last, credit from customer where w = ? and d = ? and c = ?", w, d, c)[0]
        local = all(supply == w for _, supply, _ in lines)
        execute(f"insert into orders {rows(8)}", (w, d, o, c, "2026-01-02", None, count, local))
        execute(f"insert into new_orders {rows(3)}", (w, d, o))
        total = 0
        for number, (i, supply, quantity) in enumerate(lines, 1):
            item = self.one(
                "select price, name, data from item where i = ?", ITEMS + 1 if wrong and number == count else i
            )
            if not item:
                return False
            left, info = self.one("select quantity, district from stock where w = ? and i = ?", supply, i)
            left += 91 - quantity if left < quantity + 10 else -quantity
            execute(
                "update stock set quantity = ?, ytd = ytd + ?, orders = orders + 1, remote = remote + ? where w = ? and"
                " i = ?",
                (left, quantity, supply != w, supply, i),
            )
            total += quantity * item[0]
            line = (w, d, o, number, i, supply, None, quantity, quantity * item[0], info[d * 24 - 24 : d * 24])
            execute(f"insert into order_line {rows(10)}", line)
        return total * (1 - discount) * (1 + tax + district_tax)

    def payment(self):
        choice, execute = self.choice, self.base.execute
        w, d = self.place()
        remote = choice.random() < 0.15
        of_w, of_d = (self.other_warehouse(w), choice.randint(1, DISTRICTS)) if remote else (w, d)
        c, amount = self.customer(of_w, of_d), choice.uniform(1, 5000)
        execute("update warehouse set ytd = ytd + ? where w = ?", (amount, w))
        name = self.one("select name, street, city, zip from warehouse where w = ?", w)[0]
        execute("update district set ytd = ytd + ? where w = ? and d = ?", (amount, w, d))
        district = self.one("select name, street, city, zip from district where w = ? and d = ?", w, d)[0]
        credit, data = self.one("select credit, data from customer where w = ? and d = ? and c = ?", of_w, of_d, c)
        if credit == "BC":
            data = f"{c} {of_d} {of_w} {d} {w} {amount:.2f} {data}"[:500]
        execute(
            "update customer set balance = balance - ?, ytd_payment = ytd_payment + ?, payments = payments + 1, data ="
            " ? where w = ? and d = ? and c = ?",
            (amount, amount, data, of_w, of_d, c),
        )
        execute(f"insert into history {rows(8)}", (of_w, of_d, c, w, d, "2026-01-02", amount, f"{name}    {district}"))

    def order_status(self):
        w, d = self.place()
        c = self.customer(w, d)
        self.one("select balance, first, middle, last from customer where w = ? and d = ? and c = ?", w, d, c)
        order = self.one(
            "select o, at, carrier from orders where w = ? and d = ? and c = ? order by o desc limit 1", w, d, c
        )
        if order:
            self.base.execute(
                "select i, supply_w, quantity, amount, delivered from order_line where w = ? and d = ? and o = ?",
                (w, d, order[0]),
            ).fetchall()

    def delivery(self):
        w, carrier, execute = self.place()[0], self.choice.randint(1, 10), self.base.execute
        for d in range(1, DISTRICTS + 1):
            o = self.one("select min(o) from new_orders where w = ? and d = ?", w, d)[0]
            if o is None:
                continue
            execute("delete from new_orders where w = ? and d = ? and o = ?", (w, d, o))
            c = self.one("select c from orders where w = ? and d = ? and o = ?", w, d, o)[0]
            execute("update orders set carrier = ? where w = ? and d = ? and o = ?", (carrier, w, d, o))
            execute("update order_line set delivered = '2026-01-03' where w = ? and d = ? and o = ?", (w, d, o))
            amount = self.one("select sum(amount) from order_line where w = ? and d = ? and o = ?", w, d, o)[0]
            execute(
                "update customer set balance = balance + ?, deliveries = deliveries + 1 where w = ? and d = ? and"
                " c = ?",
                (amount, w, d, c),
            )

    def stock_level(self):
        w, d = self.place()
        o = self.one("select next_order from district where w = ? and d = ?", w, d)[0]
        self.one(
            "select count(distinct stock.i) from order_line join stock on stock.w = order_line.w and stock.i ="
            " order_line.i where order_line.w = ? and order_line.d = ? and order_line.o between ? and ? and"
            " stock.quantity < ?",
            w,
            d,
            o - 20,
            o - 1,
            self.choice.randint(10, 20),
        )


def run(path, seconds, seed):
    """Transactions for some seconds, and until there were some New-Orders: how many a minute (tpmC), and what each
    took."""
    terminal = Terminal(connect(path), seed)
    took = {name: [] for name in MIX}
    began, cpu = time.perf_counter(), time.process_time()
    now = began
    while now < began + seconds or len(took["new_order"]) < 3:
        name = terminal.choice.choices(list(MIX), MIX.values())[0]
        terminal.run(name)
        before, now = now, time.perf_counter()
        took[name].append(now - before)
    seconds = now - began
    orders = sorted(took["new_order"])
    return {
        "transactions": sum(map(len, took.values())),
        "transactions_per_second": sum(map(len, took.values())) / seconds,
        "tpmc": len(orders) / seconds * 60,
        "new_order_ms": statistics.fmean(orders) * 1e3,
        "new_order_p90_ms": orders[len(orders) * 9 // 10] * 1e3,
        "program_cpu": (time.process_time() - cpu) / seconds,
        "seconds": seconds,
    }


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2])
    else:
        print(json.dumps(run(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))))
        sys.stdout.flush()
        # The database stays as a crash would leave it: closing it would copy the log, which nobody waits for.
        os._exit(0)
