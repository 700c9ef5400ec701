SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.appended (
    source_id bigint NOT NULL,
    sequence bigint NOT NULL,
    time_us bigint NOT NULL
);
CREATE TABLE public.calls (
    call_id text NOT NULL COLLATE pg_catalog."C",
    time_us bigint NOT NULL,
    gateway bytea
);
CREATE TABLE public.cursors (
    name text NOT NULL COLLATE pg_catalog."C",
    "position" bigint NOT NULL
);
CREATE TABLE public.deletions (
    number bigint NOT NULL,
    client text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL COLLATE pg_catalog."C",
    time_us bigint NOT NULL
);
CREATE SEQUENCE public.deletions_number_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.deletions_number_seq OWNED BY public.deletions.number;
CREATE TABLE public.records (
    "position" bigint NOT NULL,
    record_id text NOT NULL COLLATE pg_catalog."C",
    time_us bigint NOT NULL,
    model text NOT NULL COLLATE pg_catalog."C",
    request_id text NOT NULL COLLATE pg_catalog."C",
    trace_id text NOT NULL COLLATE pg_catalog."C",
    client text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL COLLATE pg_catalog."C",
    finish_reason text NOT NULL COLLATE pg_catalog."C",
    duration_ms double precision,
    duration_class integer,
    ttft_ms double precision,
    ttft_class integer,
    call_id text COLLATE pg_catalog."C",
    of_call integer NOT NULL,
    refused boolean NOT NULL,
    body bytea NOT NULL
);
CREATE SEQUENCE public.records_position_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.records_position_seq OWNED BY public.records."position";
CREATE TABLE public.schema_version (
    version integer NOT NULL
);
CREATE TABLE public.shares (
    client text NOT NULL COLLATE pg_catalog."C",
    refused boolean NOT NULL,
    bytes bigint NOT NULL
)
WITH (fillfactor='50');
CREATE TABLE public.sources (
    source_id bigint NOT NULL,
    source text NOT NULL COLLATE pg_catalog."C"
);
CREATE SEQUENCE public.sources_source_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.sources_source_id_seq OWNED BY public.sources.source_id;
CREATE TABLE public.usage (
    client text NOT NULL COLLATE pg_catalog."C",
    hour bigint NOT NULL,
    model text NOT NULL COLLATE pg_catalog."C",
    requests bigint NOT NULL,
    failed_requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    duration_us bigint NOT NULL,
    engine_us bigint NOT NULL
)
WITH (fillfactor='80');
ALTER TABLE ONLY public.deletions ALTER COLUMN number SET DEFAULT nextval('public.deletions_number_seq'::regclass);
ALTER TABLE ONLY public.records ALTER COLUMN "position" SET DEFAULT nextval('public.records_position_seq'::regclass);
ALTER TABLE ONLY public.sources ALTER COLUMN source_id SET DEFAULT nextval('public.sources_source_id_seq'::regclass);
INSERT INTO public.appended VALUES (1, 1, 1795880289871271);
INSERT INTO public.appended VALUES (1, 2, 1795880289871271);
INSERT INTO public.appended VALUES (1, 3, 1795880289871271);
INSERT INTO public.appended VALUES (1, 4, 1795880289871271);
INSERT INTO public.records VALUES (1, '00000000-0000-0000-0000-000000000001', 1790000000000000, 'a', '', 't1', '', 'OK', 'stop', 10, 13, 1, 0, NULL, 0, false, '\x0a2430303030303030302d303030302d303030302d303030302d3030303030303030303030311a080880f7c4d5061001220161320861206e6565646c654a0473746f7052024f4b71000000000000f03f7900000000000024408201027431');
INSERT INTO public.records VALUES (2, '00000000-0000-0000-0000-000000000002', 1790000000000000, 'b', 'same', 't2', '', 'INTERNAL', '', 20, 17, 2, 4, NULL, 0, false, '\x0a2430303030303030302d303030302d303030302d303030302d303030303030303030303032120473616d651a080880f7c4d50610022201625208494e5445524e414c71000000000000004079000000000000344082010274328a01066e6565646c65');
INSERT INTO public.records VALUES (3, '00000000-0000-0000-0000-000000000003', 1790000000000000, 'a', '', 't3', '', 'OK', 'length', 30, 19, 3, 6, NULL, 0, false, '\x0a2430303030303030302d303030302d303030302d303030302d3030303030303030303030331a080880f7c4d50610032201613a0567726fc39f4a066c656e67746852024f4b710000000000000840790000000000003e408201027433');
INSERT INTO public.records VALUES (4, '00000000-0000-0000-0000-000000000004', 1790000000000000, 'b', 'same', 't4', '', 'OK', '', 40, 21, NULL, NULL, NULL, 0, false, '\x0a2430303030303030302d303030302d303030302d303030302d303030303030303030303034120473616d651a080880f7c4d50610042201623a106861792c206e6565646c652c2068617952024f4b7900000000000044408201027434');
INSERT INTO public.schema_version VALUES (6);
INSERT INTO public.shares VALUES ('', false, 2779);
INSERT INTO public.sources VALUES (1, 'e0cad317-99d4-4f04-8399-3bd8caa20224');
INSERT INTO public.usage VALUES ('', 497222, 'a', 2, 0, 0, 0, 0, 40000, 40000);
INSERT INTO public.usage VALUES ('', 497222, 'b', 2, 1, 0, 0, 0, 60000, 60000);
SELECT pg_catalog.setval('public.deletions_number_seq', 1, false);
SELECT pg_catalog.setval('public.records_position_seq', 4, true);
SELECT pg_catalog.setval('public.sources_source_id_seq', 1, true);
ALTER TABLE ONLY public.appended
    ADD CONSTRAINT appended_pkey PRIMARY KEY (source_id, sequence);
ALTER TABLE ONLY public.calls
    ADD CONSTRAINT calls_pkey PRIMARY KEY (call_id);
ALTER TABLE ONLY public.cursors
    ADD CONSTRAINT cursors_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.deletions
    ADD CONSTRAINT deletions_client_key_value_key UNIQUE (client, key, value);
ALTER TABLE ONLY public.deletions
    ADD CONSTRAINT deletions_pkey PRIMARY KEY (number);
ALTER TABLE ONLY public.records
    ADD CONSTRAINT records_pkey PRIMARY KEY ("position");
ALTER TABLE ONLY public.records
    ADD CONSTRAINT records_record_id_key UNIQUE (record_id);
ALTER TABLE ONLY public.shares
    ADD CONSTRAINT shares_pkey PRIMARY KEY (client, refused);
ALTER TABLE ONLY public.sources
    ADD CONSTRAINT sources_pkey PRIMARY KEY (source_id);
ALTER TABLE ONLY public.sources
    ADD CONSTRAINT sources_source_key UNIQUE (source);
ALTER TABLE ONLY public.usage
    ADD CONSTRAINT usage_pkey PRIMARY KEY (client, hour, model);
CREATE INDEX calls_deleted ON public.calls USING btree (time_us) WHERE (gateway IS NULL);
CREATE INDEX records_by_call ON public.records USING btree (call_id) WHERE (call_id IS NOT NULL);
CREATE INDEX records_by_client ON public.records USING btree (client, time_us);
CREATE INDEX records_by_duration ON public.records USING btree (duration_class);
CREATE INDEX records_by_finish_reason ON public.records USING btree (finish_reason, time_us);
CREATE INDEX records_by_model ON public.records USING btree (model, time_us);
CREATE INDEX records_by_request_id ON public.records USING btree (request_id, time_us);
CREATE INDEX records_by_status ON public.records USING btree (status, time_us);
CREATE INDEX records_by_time ON public.records USING btree (time_us, "position", duration_ms, ttft_ms);
CREATE INDEX records_by_trace_id ON public.records USING btree (trace_id, time_us);
CREATE INDEX records_by_ttft ON public.records USING btree (ttft_class);
CREATE INDEX records_refused ON public.records USING btree (client, time_us) WHERE (refused = true);
CREATE INDEX usage_by_model ON public.usage USING btree (model);
