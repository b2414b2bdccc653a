/*
 * The core workloads of YCSB on RocksDB, with little around them: keys, records, distributions and mixes are by YCSB's
 * definition, so that a run asks of the storage what YCSB's does.
 *
 *   ycsb load|run --dir D --records N [options]      (see `usage`)
 *
 * What was measured is JSON on the standard output. A record that must be there and is not ends the run with 1.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <rocksdb/c.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char usage[] =
    "usage: ycsb load|run --dir DIRECTORY --records N\n"
    "  --fields 10 --field-bytes 100     the record\n"
    "  --workload a|b|c|d|e|scan70       run: the mix (scan70: 70 % scans, 30 % inserts)\n"
    "  --distribution zipfian|latest|uniform   run: of the keys (the workload's own)\n"
    "  --scan-length 100                 run: the longest scan; lengths are uniform\n"
    "  --operations N, --seconds S       run: its end, by what comes first\n"
    "  --threads 1 --seed 1\n"
    "  --cache-bytes 8388608             RocksDB's block cache\n"
    "  --write-buffer 67108864           RocksDB's memtable\n"
    "  --direct 0                        1: O_DIRECT for reads, flushes and compactions\n"
    "  --latencies FILE                  lines of: kind, microseconds, count\n"
    "  --timeline FILE --interval-ms 1000   lines of: seconds since the start, operations a second\n"
    "SIGTERM ends a run as --seconds does. A load ends with a flush and a compaction of everything; its seconds are "
    "without them.\n";

static void die(const char *form, ...) {
    va_list rest;
    va_start(rest, form);
    fputs("ycsb: ", stderr);
    vfprintf(stderr, form, rest);
    fputc('\n', stderr);
    exit(1);
}

/* ---- Random numbers and YCSB's distributions ---- */

struct random {
    uint64_t state;
};

static uint64_t random_next(struct random *random) {
    /* splitmix64 */
    uint64_t z = random->state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double random_unit(struct random *random) {
    return (double)(random_next(random) >> 11) * 0x1p-53;
}

static uint64_t fnv64(uint64_t value) {
    uint64_t hash = 0xCBF29CE484222325u;
    for (int byte = 0; byte < 8; byte++, value >>= 8) {
        hash = (hash ^ (value & 0xFF)) * 1099511628211u;
    }
    /* YCSB takes the absolute value of a signed number. */
    return hash >> 63 ? -hash : hash;
}

static const double THETA = 0.99;

/* Gray et al., "Quickly generating billion-record synthetic databases". */
struct zipfian {
    uint64_t items;
    double zeta_items, zeta_two, eta;
};

static void zipfian_settle(struct zipfian *zipfian) {
    zipfian->zeta_two = 1 + pow(0.5, THETA);
    zipfian->eta = (1 - pow(2.0 / (double)zipfian->items, 1 - THETA)) / (1 - zipfian->zeta_two / zipfian->zeta_items);
}

static void zipfian_grow(struct zipfian *zipfian, uint64_t items) {
    if (items <= zipfian->items) {
        return;
    }
    for (uint64_t item = zipfian->items; item < items; item++) {
        zipfian->zeta_items += 1 / pow((double)(item + 1), THETA);
    }
    zipfian->items = items;
    zipfian_settle(zipfian);
}

static uint64_t zipfian_next(const struct zipfian *zipfian, struct random *random) {
    double unit = random_unit(random), scaled = unit * zipfian->zeta_items;
    if (scaled < 1) {
        return 0;
    }
    if (scaled < zipfian->zeta_two) {
        return 1;
    }
    return (uint64_t)((double)zipfian->items * pow(zipfian->eta * unit - zipfian->eta + 1, 1 / (1 - THETA)));
}

/* The scrambled one draws from a fixed number of items, whose zeta YCSB has computed once. */
static struct zipfian zipfian_of_scrambled(void) {
    struct zipfian zipfian = {.items = 10000000000u, .zeta_items = 26.46902820178302};
    zipfian_settle(&zipfian);
    return zipfian;
}

/* ---- What is to be done ---- */

enum kind { READ, UPDATE, INSERT, SCAN, KINDS };
static const char *const kind_names[] = {"read", "update", "insert", "scan"};
enum distribution { ZIPFIAN, LATEST, UNIFORM };

struct workload {
    const char *name;
    double part[KINDS];
    enum distribution distribution;
};

static const struct workload workloads[] = {
    {"a", {[READ] = 0.5, [UPDATE] = 0.5}, ZIPFIAN},      {"b", {[READ] = 0.95, [UPDATE] = 0.05}, ZIPFIAN},
    {"c", {[READ] = 1}, ZIPFIAN},                        {"d", {[READ] = 0.95, [INSERT] = 0.05}, LATEST},
    {"e", {[SCAN] = 0.95, [INSERT] = 0.05}, ZIPFIAN},    {"scan70", {[SCAN] = 0.7, [INSERT] = 0.3}, ZIPFIAN},
};

static struct {
    bool load;
    const char *directory, *latencies, *timeline;
    uint64_t records, fields, field_bytes, operations, threads, cache_bytes, write_buffer, seed;
    uint64_t scan_length, interval_ms;
    double seconds;
    bool direct;
    struct workload workload;
} options = {
    .fields = 10, .field_bytes = 100, .threads = 1, .cache_bytes = 8 << 20, .write_buffer = 64 << 20,
    .seed = 1, .scan_length = 100, .interval_ms = 1000,
};

static uint64_t whole_number(const char *name, const char *text) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-') {
        die("%s: '%s' is no number", name, text);
    }
    return value;
}

static enum distribution distribution_by_name(const char *name) {
    static const char *const names[] = {"zipfian", "latest", "uniform"};
    for (int each = ZIPFIAN; each <= UNIFORM; each++) {
        if (!strcmp(name, names[each])) {
            return (enum distribution)each;
        }
    }
    die("there is no distribution '%s'", name);
    return ZIPFIAN;
}

static const struct workload *workload_by_name(const char *name) {
    for (size_t each = 0; each < sizeof workloads / sizeof *workloads; each++) {
        if (!strcmp(name, workloads[each].name)) {
            return &workloads[each];
        }
    }
    die("there is no workload '%s'", name);
    return NULL;
}

static void parse(int count, char **words) {
    struct {
        const char *name;
        uint64_t *value;
    } numbers[] = {
        {"--records", &options.records},           {"--fields", &options.fields},
        {"--field-bytes", &options.field_bytes},   {"--operations", &options.operations},
        {"--threads", &options.threads},           {"--cache-bytes", &options.cache_bytes},
        {"--write-buffer", &options.write_buffer}, {"--seed", &options.seed},
        {"--scan-length", &options.scan_length},   {"--interval-ms", &options.interval_ms},
    };
    const char *workload = NULL, *distribution = NULL;
    if (count < 2 || (strcmp(words[1], "load") && strcmp(words[1], "run"))) {
        fputs(usage, stderr);
        exit(2);
    }
    options.load = !strcmp(words[1], "load");
    for (int at = 2; at < count; at += 2) {
        const char *name = words[at], *value = words[at + 1];
        if (at + 1 == count) {
            die("%s: its value is missing", name);
        }
        bool known = false;
        for (size_t each = 0; each < sizeof numbers / sizeof *numbers && !known; each++) {
            if (!strcmp(name, numbers[each].name)) {
                *numbers[each].value = whole_number(name, value);
                known = true;
            }
        }
        if (known) {
            continue;
        } else if (!strcmp(name, "--dir")) {
            options.directory = value;
        } else if (!strcmp(name, "--latencies")) {
            options.latencies = value;
        } else if (!strcmp(name, "--timeline")) {
            options.timeline = value;
        } else if (!strcmp(name, "--seconds")) {
            options.seconds = atof(value);
        } else if (!strcmp(name, "--direct")) {
            options.direct = whole_number(name, value) != 0;
        } else if (!strcmp(name, "--workload")) {
            workload = value;
        } else if (!strcmp(name, "--distribution")) {
            distribution = value;
        } else {
            die("%s: there is no such option\n%s", name, usage);
        }
    }
    if (!options.directory || !options.records || !options.fields || !options.threads || !options.scan_length ||
        !options.interval_ms) {
        die("--dir and --records are needed, and nothing may be 0\n%s", usage);
    }
    if (options.load) {
        options.workload = (struct workload){"load", {[INSERT] = 1}, UNIFORM};
        options.operations = options.records;
        return;
    }
    if (!workload || (!options.operations && options.seconds <= 0)) {
        die("a run needs --workload, and --operations or --seconds\n%s", usage);
    }
    options.workload = *workload_by_name(workload);
    if (distribution) {
        options.workload.distribution = distribution_by_name(distribution);
    }
}

/* ---- Numbers of keys: those handed out, and those below which all are in the database ---- */

enum { WINDOW = 1 << 16 };
static struct {
    _Atomic uint64_t next, acknowledged;
    pthread_mutex_t lock;
    bool done[WINDOW];
} keys = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void acknowledge(uint64_t number) {
    pthread_mutex_lock(&keys.lock);
    keys.done[number % WINDOW] = true;
    uint64_t at = keys.acknowledged;
    while (keys.done[at % WINDOW]) {
        keys.done[at++ % WINDOW] = false;
    }
    keys.acknowledged = at;
    pthread_mutex_unlock(&keys.lock);
}

/* ---- Latencies: buckets whose width is at most a 64th of what they hold ---- */

enum { SUB_BITS = 6, SUBS = 1 << SUB_BITS, BUCKETS = (64 - SUB_BITS + 1) * SUBS };

struct latencies {
    uint64_t count[BUCKETS];
    uint64_t total, nanoseconds;
};

static size_t bucket_of(uint64_t nanoseconds) {
    if (nanoseconds < SUBS) {
        return nanoseconds;
    }
    int shift = 63 - __builtin_clzll(nanoseconds) - SUB_BITS;
    return ((size_t)(shift + 1) << SUB_BITS) + ((nanoseconds >> shift) & (SUBS - 1));
}

/* The middle of a bucket, in microseconds. */
static double bucket_us(size_t bucket) {
    if (bucket < SUBS) {
        return (double)bucket / 1000;
    }
    int shift = (int)(bucket >> SUB_BITS) - 1;
    return ldexp((double)(SUBS + (bucket & (SUBS - 1))) + 0.5, shift) / 1000;
}

static void latencies_add(struct latencies *latencies, uint64_t nanoseconds) {
    latencies->count[bucket_of(nanoseconds)]++;
    latencies->total++;
    latencies->nanoseconds += nanoseconds;
}

static double percentile_us(const struct latencies *latencies, double part) {
    uint64_t seen = 0, wanted = (uint64_t)ceil((double)latencies->total * part);
    for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
        seen += latencies->count[bucket];
        if (seen && seen >= wanted) {
            return bucket_us(bucket);
        }
    }
    return 0;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* ---- Workers ---- */

enum { INTERVALS = 1 << 17 };
static rocksdb_t *database;
static rocksdb_readoptions_t *reading;
static rocksdb_writeoptions_t *writing;
static uint64_t began;
static _Atomic uint64_t started_operations;
static _Atomic uint32_t timeline[INTERVALS];
static volatile sig_atomic_t stopped;

static void stop(int number) {
    (void)number;
    stopped = 1;
}

struct worker {
    pthread_t thread;
    struct random random;
    struct zipfian zipfian;
    char *record;
    size_t record_bytes;
    uint64_t checksum;
    struct latencies latencies[KINDS];
};

static size_t key_text(char *text, size_t room, uint64_t number) {
    return (size_t)snprintf(text, room, "user%" PRIu64, fnv64(number));
}

static void check(char *error) {
    if (error) {
        die("RocksDB: %s", error);
    }
}

/* Printable characters, six to a random number, as YCSB fills its fields. */
static void fill(struct random *random, char *at, size_t length) {
    uint64_t bits = 0;
    for (size_t each = 0; each < length; each++, bits >>= 6) {
        bits = each % 6 ? bits : random_next(random);
        at[each] = (char)(' ' + (bits & 63));
    }
}

static void put_length(char **at, size_t length) {
    for (int shift = 24; shift >= 0; shift -= 8) {
        *(*at)++ = (char)(length >> shift);
    }
}

/* A record: each field's name and value with their lengths before them. */
static void new_record(struct worker *worker) {
    char *at = worker->record;
    for (uint64_t field = 0; field < options.fields; field++) {
        char name[32];
        size_t length = (size_t)snprintf(name, sizeof name, "field%" PRIu64, field);
        put_length(&at, length);
        memcpy(at, name, length);
        at += length;
        put_length(&at, options.field_bytes);
        fill(&worker->random, at, options.field_bytes);
        at += options.field_bytes;
    }
    worker->record_bytes = (size_t)(at - worker->record);
}

static size_t get_length(const char *at) {
    const unsigned char *bytes = (const unsigned char *)at;
    return (size_t)bytes[0] << 24 | (size_t)bytes[1] << 16 | (size_t)bytes[2] << 8 | bytes[3];
}

/* Goes through a record's fields; gives where the value of the field `wanted` begins. */
static size_t walk(struct worker *worker, const char *record, size_t length, uint64_t wanted) {
    size_t at = 0, found = 0;
    for (uint64_t part = 0; part < 2 * options.fields; part++) {
        if (at + 4 > length || get_length(record + at) > length - at - 4) {
            die("a record of %zu bytes is damaged at %zu", length, at);
        }
        if (part == 2 * wanted + 1) {
            found = at + 4;
        }
        worker->checksum += (unsigned char)record[at + 4];
        at += 4 + get_length(record + at);
    }
    return found;
}

static uint64_t choose_key(struct worker *worker) {
    uint64_t there = keys.acknowledged;
    switch (options.workload.distribution) {
    case UNIFORM:
        return random_next(&worker->random) % there;
    case LATEST:
        zipfian_grow(&worker->zipfian, there);
        return there - 1 - zipfian_next(&worker->zipfian, &worker->random) % there;
    case ZIPFIAN:
        break;
    }
    /* Over twice the inserts that are expected, so that keys keep their popularity as the database grows. */
    uint64_t expected = (uint64_t)((double)options.operations * options.workload.part[INSERT] * 2), key;
    do {
        key = fnv64(zipfian_next(&worker->zipfian, &worker->random)) % (options.records + expected);
    } while (key >= there);
    return key;
}

static rocksdb_pinnableslice_t *get(const char *key, size_t length) {
    char *error = NULL;
    rocksdb_pinnableslice_t *slice = rocksdb_get_pinned(database, reading, key, length, &error);
    check(error);
    if (!slice) {
        die("record %s is missing", key);
    }
    return slice;
}

static void operate(struct worker *worker, enum kind kind) {
    char key[32], *error = NULL;
    uint64_t number = kind == INSERT ? keys.next++ : choose_key(worker);
    size_t key_length = key_text(key, sizeof key, number), length;
    if (kind == READ) {
        rocksdb_pinnableslice_t *slice = get(key, key_length);
        const char *value = rocksdb_pinnableslice_value(slice, &length);
        walk(worker, value, length, 0);
        rocksdb_pinnableslice_destroy(slice);
    } else if (kind == UPDATE) {
        /* One field is new: the record is read, changed and written. */
        rocksdb_pinnableslice_t *slice = get(key, key_length);
        const char *value = rocksdb_pinnableslice_value(slice, &length);
        size_t field = walk(worker, value, length, random_next(&worker->random) % options.fields);
        memcpy(worker->record, value, length);
        rocksdb_pinnableslice_destroy(slice);
        fill(&worker->random, worker->record + field, options.field_bytes);
        rocksdb_put(database, writing, key, key_length, worker->record, length, &error);
    } else if (kind == INSERT) {
        new_record(worker);
        rocksdb_put(database, writing, key, key_length, worker->record, worker->record_bytes, &error);
        check(error);
        acknowledge(number);
    } else {
        uint64_t left = 1 + random_next(&worker->random) % options.scan_length;
        rocksdb_iterator_t *iterator = rocksdb_create_iterator(database, reading);
        for (rocksdb_iter_seek(iterator, key, key_length); left && rocksdb_iter_valid(iterator); left--) {
            const char *value = rocksdb_iter_value(iterator, &length);
            walk(worker, value, length, 0);
            rocksdb_iter_next(iterator);
        }
        rocksdb_iter_get_error(iterator, &error);
        rocksdb_iter_destroy(iterator);
    }
    check(error);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    uint64_t end = options.seconds > 0 ? began + (uint64_t)(options.seconds * 1e9) : UINT64_MAX;
    for (uint64_t start = now(); start < end && !stopped; start = now()) {
        if (options.operations && started_operations++ >= options.operations) {
            break;
        }
        double unit = random_unit(&worker->random);
        enum kind kind = READ;
        while (kind < SCAN && unit >= options.workload.part[kind]) {
            unit -= options.workload.part[kind++];
        }
        operate(worker, kind);
        uint64_t done = now(), interval = (done - began) / (options.interval_ms * 1000000);
        latencies_add(&worker->latencies[kind], done - start);
        timeline[interval < INTERVALS ? interval : INTERVALS - 1]++;
    }
    return NULL;
}

/* ---- From start to end ---- */

static void open_database(void) {
    char *error = NULL;
    rocksdb_options_t *how = rocksdb_options_create();
    rocksdb_block_based_table_options_t *tables = rocksdb_block_based_options_create();
    if (options.cache_bytes) {
        rocksdb_block_based_options_set_block_cache(tables, rocksdb_cache_create_lru(options.cache_bytes));
    } else {
        rocksdb_block_based_options_set_no_block_cache(tables, 1);
    }
    rocksdb_options_set_block_based_table_factory(how, tables);
    rocksdb_options_set_create_if_missing(how, options.load);
    /* Fields of random characters do not compress. */
    rocksdb_options_set_compression(how, rocksdb_no_compression);
    rocksdb_options_set_write_buffer_size(how, options.write_buffer);
    rocksdb_options_set_use_direct_reads(how, options.direct);
    rocksdb_options_set_use_direct_io_for_flush_and_compaction(how, options.direct);
    database = rocksdb_open(how, options.directory, &error);
    check(error);
    reading = rocksdb_readoptions_create();
    writing = rocksdb_writeoptions_create();
}

static void settle(void) {
    char *error = NULL;
    rocksdb_flushoptions_t *how = rocksdb_flushoptions_create();
    rocksdb_flush(database, how, &error);
    check(error);
    rocksdb_flushoptions_destroy(how);
    rocksdb_compact_range(database, NULL, 0, NULL, 0);
}

static FILE *open_output(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) {
        die("%s: %s", path, strerror(errno));
    }
    return file;
}

static void write_latencies(const struct latencies *latencies) {
    FILE *file = open_output(options.latencies);
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
            if (latencies[kind].count[bucket]) {
                fprintf(file, "%s %.3f %" PRIu64 "\n", kind_names[kind], bucket_us(bucket),
                        latencies[kind].count[bucket]);
            }
        }
    }
    fclose(file);
}

/* The last interval is left out unless it is whole. */
static void write_timeline(double seconds) {
    FILE *file = open_output(options.timeline);
    double width = (double)options.interval_ms / 1000;
    for (size_t each = 0; each < INTERVALS && (double)(each + 1) * width <= seconds; each++) {
        fprintf(file, "%.3f %.1f\n", (double)each * width, (double)timeline[each] / width);
    }
    fclose(file);
}

static void print_results(const struct latencies *latencies, double seconds) {
    uint64_t operations = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        operations += latencies[kind].total;
    }
    printf("{\"workload\": \"%s\", \"records\": %" PRIu64 ", \"operations\": %" PRIu64
           ", \"seconds\": %.6f, \"ops_per_second\": %.3f",
           options.workload.name, options.records, operations, seconds, (double)operations / seconds);
    for (int kind = 0; kind < KINDS; kind++) {
        const struct latencies *each = &latencies[kind];
        if (each->total) {
            printf(", \"%s\": {\"count\": %" PRIu64
                   ", \"mean_us\": %.3f, \"p50\": %.3f, \"p95\": %.3f, \"p99\": %.3f}",
                   kind_names[kind], each->total, (double)each->nanoseconds / (double)each->total / 1000,
                   percentile_us(each, 0.5), percentile_us(each, 0.95), percentile_us(each, 0.99));
        }
    }
    puts("}");
}

static struct worker *make_workers(void) {
    struct worker *workers = calloc(options.threads, sizeof *workers);
    struct zipfian zipfian = {0};
    if (options.workload.distribution == ZIPFIAN) {
        zipfian = zipfian_of_scrambled();
    } else if (options.workload.distribution == LATEST) {
        zipfian_grow(&zipfian, options.records);
    }
    for (uint64_t each = 0; workers && each < options.threads; each++) {
        workers[each].random.state = options.seed * 0x9E3779B97F4A7C15u + each * 0xD1342543DE82EF95u;
        workers[each].zipfian = zipfian;
        workers[each].record = malloc(options.fields * (options.field_bytes + 40));
        if (!workers[each].record) {
            die("no memory");
        }
    }
    if (!workers) {
        die("no memory");
    }
    return workers;
}

int main(int count, char **words) {
    parse(count, words);
    struct worker *workers = make_workers();
    static struct latencies latencies[KINDS];
    keys.next = keys.acknowledged = options.load ? 0 : options.records;
    open_database();
    /* A database that is half loaded is of no use to anybody. */
    signal(SIGTERM, options.load ? SIG_DFL : stop);
    began = now();
    for (uint64_t each = 0; each < options.threads; each++) {
        if (pthread_create(&workers[each].thread, NULL, work, &workers[each])) {
            die("no thread");
        }
    }
    for (uint64_t each = 0; each < options.threads; each++) {
        pthread_join(workers[each].thread, NULL);
        for (int kind = 0; kind < KINDS; kind++) {
            const struct latencies *more = &workers[each].latencies[kind];
            for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
                latencies[kind].count[bucket] += more->count[bucket];
            }
            latencies[kind].total += more->total;
            latencies[kind].nanoseconds += more->nanoseconds;
        }
    }
    double seconds = (double)(now() - began) / 1e9;
    if (options.load) {
        settle();
    }
    rocksdb_close(database);
    if (options.latencies) {
        write_latencies(latencies);
    }
    if (options.timeline) {
        write_timeline(seconds);
    }
    print_results(latencies, seconds);
    return 0;
}
