// The JSON schemas that zod makes of each kind of field, one a line as [name, schema], for tests/unit/test_json_schemas.py.
// Run where zod is installed: node zod_schemas.mjs > tests/unit/data/zod_schemas.json

import { z } from "zod";

const Tree = z.object({ name: z.string(), get children() { return z.array(Tree); } });
const List = z.object({ value: z.int(), get next() { return List.nullable(); } });
const cat = z.object({ kind: z.literal("cat"), lives: z.int() });
const dog = z.object({ kind: z.literal("dog"), isGood: z.boolean().optional() });
const parts = { a: z.string(), b: z.number() };

const texts = {
  string: z.string(), min: z.string().min(3), max: z.string().max(5), length: z.string().length(4),
  nonempty: z.string().nonempty(), both: z.string().min(2).max(4), regex: z.string().regex(/^[a-z]{2,5}$/),
  flags: z.string().regex(/^ab+$/i), unanchored: z.string().regex(/b{2}/), startsWith: z.string().startsWith("ab"),
  endsWith: z.string().endsWith("yz"), includes: z.string().includes("mid"), lowercase: z.string().lowercase(),
  uppercase: z.string().uppercase(), trim: z.string().trim(), toLowerCase: z.string().toLowerCase(),
  mixed: z.string().startsWith("a").endsWith("z").max(9), slash: z.string().regex(/^a\/b\.c$/),
  ahead: z.string().regex(/^(?=.*\d)[a-z\d]{3,8}$/), described: z.string().describe("A name."),
  email: z.email(), emailHtml5: z.email({ pattern: z.regexes.html5Email }),
  emailUnicode: z.email({ pattern: z.regexes.unicodeEmail }), guid: z.guid(), uuid: z.uuid(), uuidv4: z.uuidv4(),
  uuidv6: z.uuidv6(), uuidv7: z.uuidv7(), url: z.url(), httpUrl: z.httpUrl(), hostname: z.hostname(),
  urlOf: z.url({ protocol: /^https$/, hostname: /^example\.com$/ }), emoji: z.emoji(), base64: z.base64(),
  base64url: z.base64url(), hex: z.hex(), jwt: z.jwt(), nanoid: z.nanoid(), cuid: z.cuid(), cuid2: z.cuid2(),
  ulid: z.ulid(), xid: z.xid(), ksuid: z.ksuid(), ipv4: z.ipv4(), ipv6: z.ipv6(), mac: z.mac(), cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(), e164: z.e164(), hash: z.hash("sha256"), date: z.iso.date(), time: z.iso.time(),
  timeOf: z.iso.time({ precision: -1 }), datetime: z.iso.datetime(), duration: z.iso.duration(),
  datetimeOf: z.iso.datetime({ offset: true, precision: 3 }), datetimeLocal: z.iso.datetime({ local: true }),
  stringFormat: z.stringFormat("cool", /^cool-\d+$/), iban: z.iban?.(), creditCard: z.creditCard?.(),
  currencyCode: z.currencyCode?.(), template: z.templateLiteral(["v", z.int(), ".", z.enum(["a", "b"])]),
  templateString: z.templateLiteral(["<", z.string(), ">"]), stringbool: z.stringbool(), slugify: z.string().slugify?.(),
};
const numbers = {
  number: z.number(), int: z.int(), int32: z.int32(), uint32: z.uint32(), float32: z.float32(), float64: z.float64(),
  gt: z.number().gt(1.5), lt: z.number().lt(-2), range: z.number().min(0).max(1), intRange: z.int().min(-5).max(5),
  positive: z.int().positive(), negative: z.number().negative(), nonnegative: z.number().nonnegative(),
  nonpositive: z.int().nonpositive(), multipleOf: z.number().multipleOf(0.25), step: z.int().multipleOf(5).min(10),
  coerced: z.coerce.number(),
};
const others = {
  boolean: z.boolean(), null: z.null(), any: z.any(), unknown: z.unknown(), json: z.json(), enum: z.enum(["a", "b"]),
  nativeEnum: z.nativeEnum({ Up: 0, Down: "down" }), exclude: z.enum(["a", "b", "c"]).exclude(["a"]),
  literal: z.literal("on"), literalNumber: z.literal(42), literalNull: z.literal(null), literals: z.literal([1, "b", true]),
  object: z.object(parts), strictObject: z.strictObject(parts), looseObject: z.looseObject(parts),
  catchall: z.object(parts).catchall(z.int()), partial: z.object(parts).partial(), pick: z.object(parts).pick({ a: true }),
  extend: z.object(parts).extend({ c: z.boolean() }), keyof: z.object(parts).keyof(), array: z.array(z.int()),
  arrayMin: z.array(z.boolean()).min(2), arrayMax: z.array(z.int()).max(3), arrayLength: z.array(z.string()).length(2),
  nonemptyArray: z.array(z.string()).nonempty(), tuple: z.tuple([z.string(), z.int()]),
  tupleRest: z.tuple([z.string()], z.boolean()), tupleOptional: z.tuple([z.string(), z.int().optional()]),
  union: z.union([z.string(), z.int()]), unionObjects: z.union([z.object(parts), cat]), tagged: z.discriminatedUnion("kind", [cat, dog]),
  xor: z.xor?.([z.object({ a: z.string() }), z.object({ b: z.int() })]), xorKinds: z.xor?.([z.string(), z.boolean()]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.int() })), and: cat.and(z.object({ name: z.string() })),
  record: z.record(z.string(), z.int()), recordEnum: z.record(z.enum(["a", "b"]), z.int()),
  recordPattern: z.record(z.string().regex(/^k[0-9]$/), z.boolean()), partialRecord: z.partialRecord(z.enum(["a", "b"]), z.int()),
  looseRecord: z.looseRecord?.(z.string().regex(/^k/), z.int()), recordNumber: z.record(z.number(), z.string()),
  optional: z.string().optional(), exactOptional: z.exactOptional?.(z.int()), nullable: z.int().nullable(),
  nullish: z.string().nullish(), nonoptional: z.nonoptional(z.string().optional()), default: z.int().default(7),
  prefault: z.string().prefault("x"), catch: z.boolean().catch(false), readonly: z.array(z.int()).readonly(),
  brand: z.string().brand(), meta: z.int().meta({ id: "Count", title: "Count", examples: [1] }),
  refine: z.string().refine((text) => text.length > 2), check: z.int().check(z.positive()), lazy: z.lazy(() => z.string()),
  pipe: z.string().pipe(z.string().max(4)), preprocess: z.preprocess(String, z.string()), promise: z.promise(z.int()),
  transform: z.string().transform((text) => text.length), codec: z.codec(z.iso.date(), z.date(), { decode: (a) => new Date(a), encode: String }),
  tree: Tree, list: List, bigint: z.bigint(), dateObject: z.date(), undefined: z.undefined(), void: z.void(), map: z.map(z.string(), z.int()),
  set: z.set(z.int()), nan: z.nan(), symbol: z.symbol(), custom: z.custom(), file: z.file(), int64: z.int64(), uint64: z.uint64(),
};

const made = new Set();
const lines = [];
function add(name, kind, options) {
  const schema = z.toJSONSchema(kind, { unrepresentable: "any", ...options });
  // A field that another dialect writes in the same way is left out.
  const field = JSON.stringify([schema.properties.a, schema.$defs ?? schema.definitions]);
  const known = field.replaceAll("#/definitions", "#/$defs");
  if (made.has(known)) return;
  made.add(known);
  lines.push(JSON.stringify([name, schema]));
}
for (const [name, kind] of Object.entries({ ...texts, ...numbers, ...others })) {
  if (kind === undefined) continue;
  add(name, z.object({ a: kind, b: z.array(kind).optional() }), { io: "input" });
}
for (const [name, kind] of Object.entries({ ...numbers, ...others }))
  for (const target of ["draft-7", "openapi-3.0"])
    if (kind !== undefined) add(`${name}, ${target}`, z.object({ a: kind }), { target, io: "output" });
console.log(`[\n${lines.join(",\n")}\n]`);
